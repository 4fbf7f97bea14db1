# A service in a zone of the page, with an address of its own.
# needs: dig
# replace: "*.clusterset.local" => "*.clusterset.local", "*.west.global"
cat >> isthmus.yaml <<'END'
services:
  - hostname: ratings.pay.west.global
    namespace: pay
    addresses: [240.250.0.7]
    ports: [{name: https, port: 443, targetPort: 8443, protocol: HTTPS}]
    endpoints: [{address: 127.0.0.9}]
END
isthmus run -c isthmus.yaml &
