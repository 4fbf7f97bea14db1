# Both organisations on one host: west with the page's config, east with an entry for west, as the page says.
# replace: name: mesh, bind: ":15443", protocol: auto => name: mesh, bind: "127.2.0.1:15443", protocol: auto
# replace: gw.west.example => 127.2.0.1
# replace: /var/lib/isthmus => state
# replace: 198.51.100.0/24 => 127.0.0.0/8
# replace: isthmus peer invite --name east => isthmus peer invite --name east --admin 127.2.0.1:15000 | tee token
# replace: isthmus peer join - --name west => isthmus peer join - --name west < token
# replace: isthmus peer plan -c new.yaml => plan
organisation() {
    mkdir -m 700 state
    isthmus certs --dir certs --trust-domain "$1.example" --workload isthmus/gateway
    mv certs/isthmus_gateway.pem cert.pem
    mv certs/isthmus_gateway-key.pem key.pem
    mv certs/ca.pem roots.pem
}
mkdir east west
mv isthmus.yaml west
(cd west && organisation west && printf 'admin: {bind: "127.2.0.1:15000"}\n' >> isthmus.yaml)
(cd east && organisation east)
cat > east/isthmus.yaml <<'END'
node: {name: gw-east, namespace: isthmus, serviceAccount: gateway, cluster: east, network: net-east}
mesh: {trustDomain: east.example}
listeners: [{name: mesh, bind: "127.1.0.1:15443", protocol: auto}]
identity: {files: {certificate: cert.pem, key: key.pem}}
trust: [{trustDomain: east.example, roots: roots.pem}]
networks:
  net-east: {gateways: [{address: 127.1.0.1, sniPort: 15443, hbonePort: 15443}]}
state: {dir: state}
services:
  - {hostname: web.shop.svc.cluster.local, namespace: shop, ports: [{name: https, port: 443, protocol: TLS}], endpoints: [{address: 127.1.1.1}]}
  - {hostname: pay.shop.svc.cluster.local, namespace: shop, ports: [{name: https, port: 443, protocol: TLS}], endpoints: [{address: 127.1.1.2}]}
  - {hostname: cart.shop.svc.cluster.local, namespace: shop, ports: [{name: https, port: 443, protocol: TLS}], endpoints: [{address: 127.1.1.3}]}
peers:
  - name: west
    import: [{services: ["ratings.pay.west.global"]}]
    export:
      - {services: [pay.shop.svc.cluster.local], as: pay.shop.east.global}
      - {services: [cart.shop.svc.cluster.local], as: cart.shop.mesh}
END
(cd west && exec isthmus run -c isthmus.yaml) &
(cd east && exec isthmus run -c isthmus.yaml) &
settle
cd east
plan() {
    sed -e 's/\[pay.shop.*}/[web.shop.svc.cluster.local], as: web.shop.east.global}/; s/cart.shop.mesh/cart.shop.east.global/; s/ratings.pay/*.pay/' isthmus.yaml > new.yaml
    isthmus peer plan -c new.yaml
}
