# The gateway of the page, with certificates of a development CA.
isthmus certs --dir certs --workload istio-system/eastwest
mkdir tls
cp certs/istio-system_eastwest.pem tls/chain.pem
cp certs/istio-system_eastwest-key.pem tls/key.pem
cp certs/ca.pem tls/roots.pem
isthmus certs --dir partner --trust-domain partner.example --workload partner/any
cp partner/ca.pem tls/partner.pem
isthmus run -c isthmus.yaml &
