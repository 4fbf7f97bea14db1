# Certificates in a folder that only this run sees.
# needs: envoy
mkdir -p /tmp/isthmus-certs
mount -t tmpfs tmpfs /tmp/isthmus-certs
