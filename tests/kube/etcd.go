package main

import (
	"flag"
	"net/url"

	"go.etcd.io/etcd/server/v3/embed"
)

// runEtcd runs a cluster of one etcd that never waits for the disk.
func runEtcd(arguments []string) {
	flags := flag.NewFlagSet("etcd", flag.ExitOnError)
	data := flags.String("data", "", "the folder of its data")
	listen := flags.String("listen", "127.0.0.1:2379", "the address for clients, with its port")
	must("etcd", flags.Parse(arguments))

	config := embed.NewConfig()
	config.Name = "rig"
	config.Dir = *data
	config.LogLevel = "error"
	config.LogOutputs = []string{"stderr"}
	config.UnsafeNoFsync = true
	config.ListenClientUrls = []url.URL{{Scheme: "http", Host: *listen}}
	config.AdvertiseClientUrls = config.ListenClientUrls
	// Other members would connect here; there are none.
	config.ListenPeerUrls = []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}
	config.AdvertisePeerUrls = config.ListenPeerUrls
	config.InitialCluster = config.InitialClusterFromName(config.Name)

	server, err := embed.StartEtcd(config)
	must("etcd", err)
	must("etcd", <-server.Err())
}
