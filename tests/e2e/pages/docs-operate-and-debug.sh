# The endpoint of the session starts before the page takes it out of use, and a client has a connection through the gateway.
# replace: isthmus endpoint drain 10.0.1.5:8443 => serve; client; isthmus endpoint drain 127.2.0.4:8443
# replace: 10.0.1.5 => 127.2.0.4
# replace: isthmus close 17 => isthmus endpoint enable 127.2.0.4; client; isthmus close "$id"
serve() {
    isthmus certs --dir certs --workload shop/reviews=reviews.shop.svc.cluster.local > /dev/null
    openssl s_server -accept 127.2.0.4:8443 -cert certs/shop_reviews.pem -key certs/shop_reviews-key.pem -www -quiet &
    settle
}
client() {
    (sleep 600 | command openssl s_client -connect 127.0.0.1:15443 -servername reviews.shop.svc.cluster.local > client.log 2>&1 &)
    until id=$(command isthmus get connections -o json | sed -n 's/.*"id": *\([0-9]*\).*/\1/p') && [[ $id ]]; do sleep 0.1; done
}
