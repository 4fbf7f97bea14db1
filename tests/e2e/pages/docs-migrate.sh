# The page's own configuration of HAProxy.
# replace: /etc/haproxy/haproxy.cfg => haproxy.cfg
