# An etcd, and a document for it.
# needs: etcd
etcd --data-dir etcd --log-level error &
cat > services.yaml <<'END'
services:
  - hostname: cart.shop.mesh
    namespace: shop
    ports: [{name: https, port: 443, protocol: HTTPS}]
    endpoints: [{address: 10.2.0.6, network: net-west}]
END
