# A control plane with a service on two networks. The block of YAML on the page is another gateway's.
cat > isthmus.yaml <<'END'
node: {cluster: east, network: east}
listen: "127.0.0.1:15443"
networks:
  east: {gateways: [{address: 127.1.0.1, sniPort: 15443}]}
  west: {gateways: [{address: 127.2.0.1, sniPort: 15443}]}
services:
  - hostname: reviews.shop.svc.cluster.local
    namespace: shop
    ports: [{name: https, port: 443, targetPort: 8443, protocol: HTTPS}]
    endpoints: [{address: 127.1.1.1, network: east}, {address: 127.2.1.1, network: west}]
exports: [{services: ["*.shop.svc.cluster.local"]}]
xds: {bind: "127.0.0.1:15010", clients: [{cidrs: [127.0.0.0/8], networks: [east, west], clusters: [east, west]}]}
END
isthmus run -c isthmus.yaml &
