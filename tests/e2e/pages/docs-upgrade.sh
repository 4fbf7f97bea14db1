# A gateway whose program file can be replaced.
# replace: /usr/bin/isthmus => bin/isthmus
mkdir -m 700 bin state
cp "$(type -P isthmus)" bin/isthmus
cp bin/isthmus isthmus-new
PATH=$PWD/bin:$PATH
printf 'listen: "127.0.0.1:15443"\nroutes: {"web.example": "127.0.0.1:8443"}\nstate: {dir: state}\n' > isthmus.yaml
isthmus run -c isthmus.yaml &
