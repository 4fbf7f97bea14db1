package conformance_test

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

const (
	etcdAddress = "127.0.0.1:2379"
	apiAddress  = "127.0.0.1:6443"
	// adminAddress is that of Isthmus.
	adminAddress = "127.0.0.1:15021"
	// token is that of a user who may do everything.
	token = "the-suites-admin"
	// startTimeout is for the API server, whose start takes long on a busy machine.
	startTimeout = 2 * time.Minute
)

// cluster is an API server with its etcd and a few controllers (tests/kube), without nodes.
type cluster struct {
	folder     string
	kubeconfig string
	client     *kubernetes.Clientset
}

// startCluster starts the API server of isthmus-kube-rig. The processes end with this one, which is the first of its PID
// namespace.
func startCluster(t *testing.T, rig, folder string) *cluster {
	c := &cluster{folder: folder, kubeconfig: filepath.Join(folder, "kubeconfig")}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	block := &pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}
	c.write(t, "accounts.key", pem.EncodeToMemory(block))
	c.write(t, "tokens.csv", []byte(token+",admin,admin,system:masters\n"))
	c.start(t, "etcd", rig, "etcd", "--data", "data", "--listen", etcdAddress)
	host, port, _ := strings.Cut(apiAddress, ":")
	c.start(t, "apiserver", rig, "apiserver", "--etcd-servers=http://"+etcdAddress, "--bind-address="+host,
		"--secure-port="+port, "--cert-dir=certificates", "--token-auth-file=tokens.csv",
		"--service-cluster-ip-range=10.96.0.0/16", "--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-signing-key-file=accounts.key", "--service-account-key-file=accounts.key",
		"--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount", "--endpoint-reconciler-type=none",
		"--advertise-address=192.0.2.1")

	// The API server writes the certificate that it makes for itself, with that of its CA.
	var ca []byte
	eventually(t, "the certificate of the API server", func() bool {
		ca, err = os.ReadFile(filepath.Join(folder, "certificates", "apiserver.crt"))
		return err == nil && len(ca) > 0
	})
	c.write(t, "kubeconfig", fmt.Appendf(nil, `apiVersion: v1
kind: Config
current-context: suite
clusters: [{name: suite, cluster: {server: "https://%s", certificate-authority-data: %s}}]
users: [{name: admin, user: {token: %s}}]
contexts: [{name: suite, context: {cluster: suite, user: admin}}]
`, apiAddress, base64.StdEncoding.EncodeToString(ca), token))
	config, err := clientcmd.BuildConfigFromFlags("", c.kubeconfig)
	require.NoError(t, err)
	config.QPS, config.Burst = 200, 400
	c.client, err = kubernetes.NewForConfig(config)
	require.NoError(t, err)
	eventually(t, "the API server", func() bool {
		answer := c.client.RESTClient().Get().AbsPath("/readyz").Do(t.Context())
		return answer.Error() == nil
	})
	c.start(t, "controllers", rig, "controllers", "--kubeconfig", "kubeconfig",
		"--service-account-private-key-file", "accounts.key")
	return c
}

// startIsthmus starts the gateway in folder and waits until it is ready.
func (c *cluster) startIsthmus(t *testing.T, binary string, ports []int, pool string) {
	config, err := yaml.Marshal(map[string]any{
		"node": map[string]any{
			"name": "suite", "cluster": "suite", "network": "net-suite", "namespace": "istio-system"},
		"listen": "127.0.0.1:15443",
		"admin":  map[string]any{"bind": adminAddress},
		// After each test the suite deletes most services of the cluster at once.
		"aggregator": map[string]any{"withdrawalHold": "0s"},
		"registries": []any{map[string]any{"kubernetes": map[string]any{
			"cluster": "suite", "kubeconfig": "kubeconfig",
			"gatewayApi": map[string]any{"class": class, "ports": ports, "pool": []string{pool}, "refusal": "close"},
		}}},
	})
	require.NoError(t, err)
	c.write(t, "isthmus.yaml", config)
	c.start(t, "isthmus", binary, "run", "-c", "isthmus.yaml")
	eventually(t, "Isthmus", func() bool {
		answer, err := http.Get("http://" + adminAddress + "/readyz")
		if err != nil {
			return false
		}
		defer answer.Body.Close()
		return answer.StatusCode == http.StatusOK
	})
}

// createAll creates the objects of a YAML file.
func createAll(t *testing.T, c client.Client, text []byte) {
	for part := range strings.SplitSeq(string(text), "\n---\n") {
		object := &unstructured.Unstructured{}
		require.NoError(t, yaml.Unmarshal([]byte(part), &object.Object))
		if len(object.Object) > 0 {
			require.NoError(t, c.Create(t.Context(), object), "%s %s", object.GetKind(), object.GetName())
		}
	}
}

// start starts a process in the folder, with its output in NAME.log. The test fails if the process ends before the test.
func (c *cluster) start(t *testing.T, name, program string, arguments ...string) {
	log, err := os.Create(filepath.Join(c.folder, name+".log"))
	require.NoError(t, err)
	command := exec.Command(program, arguments...)
	command.Dir, command.Stdout, command.Stderr = c.folder, log, log
	require.NoError(t, command.Start(), name)
	ended := make(chan error, 1)
	go func() { ended <- command.Wait() }()
	t.Cleanup(func() {
		select {
		case err := <-ended:
			t.Errorf("%s ended (%v); see %s", name, err, log.Name())
		default:
			_ = command.Process.Kill()
			<-ended
		}
	})
}

func (c *cluster) write(t *testing.T, name string, text []byte) {
	require.NoError(t, os.WriteFile(filepath.Join(c.folder, name), text, 0o600))
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for begun := time.Now(); !is(); time.Sleep(100 * time.Millisecond) {
		if time.Since(begun) > startTimeout {
			t.Fatalf("%s is not ready", what)
		}
	}
}
