# A site that stands in for example.com.
# replace: example.com:443 => 127.0.0.1:8443
# replace: curl --connect-to => curl --cacert certs/ca.pem --connect-to
isthmus certs --dir certs --workload web/example=example.com
openssl s_server -accept 127.0.0.1:8443 -cert certs/web_example.pem -key certs/web_example-key.pem -www -quiet &
