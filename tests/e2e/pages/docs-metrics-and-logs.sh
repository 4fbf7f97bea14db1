# A gateway that has refused a connection, whose trace the page asks for.
# replace: 4bf92f3577b34da6a3ce929d0e0e4736 => "$trace"
printf 'listen: "127.0.0.1:15443"\nroutes: {"web.example": "127.0.0.1:8443"}\n' > isthmus.yaml
isthmus run -c isthmus.yaml > gateway.log &
curl -s --connect-to ::127.0.0.1:15443 https://other.example/ || true
until trace=$(sed -n 's/.*"trace_id":"\([^"]*\)".*/\1/p' gateway.log) && [[ $trace ]]; do sleep 0.1; done
