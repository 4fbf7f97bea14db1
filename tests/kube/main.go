// Isthmus-kube-rig runs the parts of Kubernetes that the end-to-end tests need: etcd, an API server and the few
// controllers that fill EndpointSlices and ServiceAccount tokens and that empty deleted namespaces.
package main

import (
	"fmt"
	"io"
	"os"
)

const usage = `isthmus-kube-rig [--attached] COMMAND [FLAG…]

  etcd         stores the objects of an API server: --data FOLDER --listen ADDRESS
  apiserver    takes the flags of kube-apiserver
  controllers  endpointslice, endpointslicemirroring, namespace, serviceaccount, serviceaccount-token:
               --kubeconfig FILE --service-account-private-key-file FILE

  --attached   ends the process when its standard input ends
`

func main() {
	arguments := os.Args[1:]
	if len(arguments) > 0 && arguments[0] == "--attached" {
		arguments = arguments[1:]
		go endWithInput()
	}
	if len(arguments) == 0 {
		fail(usage)
	}
	switch command, flags := arguments[0], arguments[1:]; command {
	case "etcd":
		runEtcd(flags)
	case "apiserver":
		runAPIServer(flags)
	case "controllers":
		runControllers(flags)
	default:
		fail("%q is not a command\n\n%s", command, usage)
	}
}

// endWithInput ends the process at the end of its standard input, which a test holds open: a test that is killed leaves
// no process behind.
func endWithInput() {
	_, _ = io.Copy(io.Discard, os.Stdin)
	os.Exit(0)
}

func fail(format string, values ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", values...)
	os.Exit(1)
}

func must(what string, err error) {
	if err != nil {
		fail("%s: %v", what, err)
	}
}
