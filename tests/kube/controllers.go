package main

import (
	"context"
	"flag"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/keyutil"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/controller/endpointslice"
	"k8s.io/kubernetes/pkg/controller/endpointslicemirroring"
	"k8s.io/kubernetes/pkg/controller/namespace"
	"k8s.io/kubernetes/pkg/controller/serviceaccount"
	tokens "k8s.io/kubernetes/pkg/serviceaccount"
)

const (
	workers = 5
	// The defaults of kube-controller-manager.
	endpointsPerSlice          = 100
	mirroredEndpointsPerSubset = 1000
)

// cluster is what the controllers of one API server have in common.
type cluster struct {
	ctx      context.Context
	config   *rest.Config
	client   kubernetes.Interface
	informer informers.SharedInformerFactory
}

// runControllers runs the controllers until the process is killed. They take no leader's lease: there is one process of
// them per API server.
func runControllers(arguments []string) {
	flags := flag.NewFlagSet("controllers", flag.ExitOnError)
	kubeconfig := flags.String("kubeconfig", "", "the API server, and a user that may do everything")
	key := flags.String("service-account-private-key-file", "", "the key that signs the tokens of service accounts")
	must("controllers", flags.Parse(arguments))

	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	must(*kubeconfig, err)
	// Tests with many objects wait for the controllers, and nothing else needs the API server's protection from them.
	config.QPS = 1000
	config.Burst = 2000
	client, err := kubernetes.NewForConfig(config)
	must(*kubeconfig, err)
	c := cluster{context.Background(), config, client, informers.NewSharedInformerFactory(client, 0)}

	// Each controller asks for its informers when it is made, and so before these are started.
	run := []func(){c.slices(), c.mirroring(), c.namespaces(), c.accounts(), c.tokens(*key)}
	c.informer.Start(c.ctx.Done())
	for _, controller := range run {
		go controller()
	}
	select {}
}

func (c cluster) slices() func() {
	core := c.informer.Core().V1()
	slices := c.informer.Discovery().V1().EndpointSlices()
	controller := endpointslice.NewController(
		c.ctx, core.Pods(), core.Services(), core.Nodes(), slices, endpointsPerSlice, c.client, 0)
	return func() { controller.Run(c.ctx, workers) }
}

func (c cluster) mirroring() func() {
	core := c.informer.Core().V1()
	slices := c.informer.Discovery().V1().EndpointSlices()
	controller := endpointslicemirroring.NewController(
		c.ctx, core.Endpoints(), slices, core.Services(), mirroredEndpointsPerSubset, c.client, 0)
	return func() { controller.Run(c.ctx, workers) }
}

func (c cluster) namespaces() func() {
	client, err := metadata.NewForConfig(c.config)
	must("namespace controller", err)
	controller := namespace.NewNamespaceController(
		c.ctx, c.client, client, c.client.Discovery().ServerPreferredNamespacedResources,
		c.informer.Core().V1().Namespaces(), 5*time.Minute, v1.FinalizerKubernetes)
	return func() { controller.Run(c.ctx, workers) }
}

// accounts gives each namespace its service account "default".
func (c cluster) accounts() func() {
	core := c.informer.Core().V1()
	controller, err := serviceaccount.NewServiceAccountsController(
		klog.FromContext(c.ctx), core.ServiceAccounts(), core.Namespaces(), c.client,
		serviceaccount.DefaultServiceAccountsControllerOptions())
	must("serviceaccount controller", err)
	return func() { controller.Run(c.ctx, 1) }
}

// tokens fills the Secrets of type kubernetes.io/service-account-token.
func (c cluster) tokens(keyFile string) func() {
	key, err := keyutil.PrivateKeyFromFile(keyFile)
	must(keyFile, err)
	generator, err := tokens.JWTTokenGenerator(tokens.LegacyIssuer, key)
	must(keyFile, err)
	core := c.informer.Core().V1()
	controller, err := serviceaccount.NewTokensController(
		klog.FromContext(c.ctx), core.ServiceAccounts(), core.Secrets(), c.client,
		serviceaccount.TokensControllerOptions{TokenGenerator: generator, RootCA: c.config.CAData})
	must("serviceaccount-token controller", err)
	return func() { controller.Run(c.ctx, workers) }
}
