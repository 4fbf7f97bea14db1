// Runs the conformance suite of the Gateway API against Isthmus, with a real API server and the suite's own echo servers.
// tests/kube/conformance builds what this needs and starts it in namespaces of its own.
package conformance_test

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	gateway "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/gateway-api/conformance"
	report "sigs.k8s.io/gateway-api/conformance/apis/v1"
	"sigs.k8s.io/gateway-api/conformance/tests"
	"sigs.k8s.io/gateway-api/conformance/utils/suite"
	"sigs.k8s.io/gateway-api/pkg/features"
	"sigs.k8s.io/yaml"
)

const (
	class = "isthmus"
	// pool has the addresses of Gateways: those of the loopback, which this host has all.
	pool = "127.0.7.0/24"
)

// ports are those of the suite's TLS and TCP listeners.
var ports = []int{443, 3000, 8080, 8443, 8883, 9300, 9301, 9302, 9310, 9311, 9312, 9313, 9320, 9321}

// notApplicable has the tests that need what Isthmus does not do, and what that is.
var notApplicable = func() map[string]string {
	const http = "it needs a listener of the protocol HTTP or HTTPS"
	all := map[string]string{}
	for _, name := range []string{
		"GatewayInvalidRouteKind",
		"GatewayInvalidTLSConfiguration",
		"GatewayListenerUnsupportedProtocol",
		"GatewayModifyListeners",
		"GatewayObservedGenerationBump",
		"GatewaySecretInvalidReferenceGrant",
		"GatewaySecretMissingReferenceGrant",
		"GatewaySecretReferenceGrantAllInNamespace",
		"GatewaySecretReferenceGrantSpecific",
		"TCPRouteInvalidNonTCPListener",
		"TLSRouteInvalidNoMatchingListener",
	} {
		all[name] = http
	}
	return all
}()

func TestConformance(t *testing.T) {
	begun := time.Now()
	folder := setting(t, "FOLDER")
	c := startCluster(t, setting(t, "RIG"), folder)
	t.Setenv("KUBECONFIG", c.kubeconfig)
	options := conformance.DefaultOptions(t)
	crds, err := filepath.Glob(filepath.Join(setting(t, "CRDS"), "*.yaml"))
	require.NoError(t, err)
	require.NotEmpty(t, crds)
	for _, file := range crds {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		createAll(t, options.Client, text)
	}
	createAll(t, options.Client, fmt.Appendf(nil, `apiVersion: v1
kind: Namespace
metadata: {name: istio-system, labels: {topology.istio.io/network: net-suite}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: GatewayClass
metadata: {name: %s}
spec: {controllerName: isthmus.io/gateway-controller}
`, class))
	startKubelet(t, c, setting(t, "ECHO"))
	c.startIsthmus(t, setting(t, "ISTHMUS"), ports, pool)
	// The suite takes the features of the class from its status.
	eventually(t, "the status of the class", func() bool {
		found := &gateway.GatewayClass{}
		err := options.Client.Get(context.Background(), types.NamespacedName{Name: class}, found)
		return err == nil && len(found.Status.SupportedFeatures) > 0
	})

	options.GatewayClassName = class
	options.ConformanceProfiles = []suite.ConformanceProfileName{
		suite.GatewayTLSConformanceProfileName, suite.GatewayTCPConformanceProfileName}
	options.Implementation = report.Implementation{
		Organization: "isthmus", Project: "isthmus", URL: "https://isthmus.io", Version: setting(t, "VERSION"),
		Contact: []string{"https://isthmus.io"}}
	options.ManifestFS = []fs.FS{fstest.MapFS{"isthmus/base.yaml": {Data: base(t)}}, &conformance.Manifests}
	options.BaseManifests = "isthmus/base.yaml"
	options.RunTest = os.Getenv("ONLY")
	for name := range notApplicable {
		options.SkipTests = append(options.SkipTests, name)
	}
	// The suite counts a parallel test as passed before it has run, so that its report would be wrong.
	all := slices.Clone(tests.ConformanceTests)
	for i := range all {
		all[i].Parallel = false
	}
	took := map[string]time.Duration{}
	since := time.Now()
	options.Hook = func(_ *testing.T, test suite.ConformanceTest, _ *suite.ConformanceTestSuite) {
		took[test.ShortName] = time.Since(since)
		since = time.Now()
	}
	run, err := suite.NewConformanceTestSuite(options)
	require.NoError(t, err)
	run.Setup(t, all)
	ready := time.Since(begun)
	since = time.Now()
	require.NoError(t, run.Run(t, all))
	result, err := run.Report()
	require.NoError(t, err)
	text, err := yaml.Marshal(result)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(folder, "report.yaml"), text, 0o644))
	summary := summarize(options.RunTest, run.SupportedFeatures.Has, result, took)
	summary += fmt.Sprintf("ready after %.0f s, done after %.0f s\n", ready.Seconds(), time.Since(begun).Seconds())
	require.NoError(t, os.WriteFile(filepath.Join(folder, "summary.txt"), []byte(summary), 0o644))
}

// base returns the suite's base manifests without their Gateways, which have HTTP listeners, and without the servers of UDP
// and gRPC.
func base(t *testing.T) []byte {
	text, err := fs.ReadFile(&conformance.Manifests, "base/manifests.yaml")
	require.NoError(t, err)
	var kept [][]byte
	for _, part := range bytes.Split(text, []byte("\n---")) {
		object := &unstructured.Unstructured{}
		require.NoError(t, yaml.Unmarshal(part, &object.Object))
		name := object.GetName()
		if object.GetKind() != "Gateway" && name != "coredns" && !strings.HasPrefix(name, "grpc-") {
			kept = append(kept, part)
		}
	}
	return bytes.Join(kept, []byte("\n---"))
}

// summarize returns the lists of tests that passed, failed and do not apply, of all tests whose features Isthmus has, or of one
// of them only.
func summarize(
	only string, has func(features.FeatureName) bool, result *report.ConformanceReport, took map[string]time.Duration,
) string {
	failed := map[string]bool{}
	for _, profile := range result.ProfileReports {
		for _, name := range profile.Core.FailedTests {
			failed[name] = true
		}
		if profile.Extended != nil {
			for _, name := range profile.Extended.FailedTests {
				failed[name] = true
			}
		}
	}
	lines := map[string][]string{}
	for _, test := range tests.ConformanceTests {
		isOther := only != "" && test.ShortName != only
		if isOther || slices.ContainsFunc(test.Features, func(name features.FeatureName) bool { return !has(name) }) {
			continue
		}
		line := fmt.Sprintf("%s (%.1f s)", test.ShortName, took[test.ShortName].Seconds())
		switch why, is := notApplicable[test.ShortName]; {
		case is:
			lines["not applicable"] = append(lines["not applicable"], test.ShortName+": "+why)
		case failed[test.ShortName]:
			lines["failed"] = append(lines["failed"], line)
		default:
			lines["passed"] = append(lines["passed"], line)
		}
	}
	var summary strings.Builder
	for _, what := range []string{"passed", "failed", "not applicable"} {
		slices.Sort(lines[what])
		fmt.Fprintf(&summary, "%s: %d\n", what, len(lines[what]))
		for _, line := range lines[what] {
			fmt.Fprintf(&summary, "  %s\n", line)
		}
	}
	return summary.String()
}

func setting(t *testing.T, name string) string {
	value := os.Getenv(name)
	require.NotEmpty(t, value, "the variable %s is not set; run tests/kube/conformance", name)
	return value
}
