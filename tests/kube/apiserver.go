package main

import (
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

// runAPIServer is kube-apiserver.
func runAPIServer(arguments []string) {
	command := app.NewAPIServerCommand()
	command.SetArgs(arguments)
	os.Exit(cli.Run(command))
}
