package conformance_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

const (
	// podNetwork is the network of pods; its first address is that of this host.
	podNetwork = "10.244.%d.%d"
	node       = "node"
)

// kubelet stands in for the controllers of Deployments and ReplicaSets, the kubelet and the container runtime. The suite has
// one image, that of its echo server; a pod is a process of that server, in a network namespace with the pod's address.
type kubelet struct {
	client *kubernetes.Clientset
	// echo is the echo server's binary.
	echo   string
	folder string
	pods   map[string]*pod
	// started counts all pods, so that no two have the same address.
	started int
}

type pod struct {
	namespace, name string
	process         *exec.Cmd
	address         string
}

// startKubelet runs the pods of all Deployments until the test ends.
func startKubelet(t *testing.T, c *cluster, echo string) {
	run(t, "ip", "link", "add", "name", "pods", "type", "bridge")
	run(t, "ip", "address", "add", fmt.Sprintf(podNetwork, 0, 1)+"/16", "dev", "pods")
	run(t, "ip", "link", "set", "dev", "pods", "up")
	_, err := c.client.CoreV1().Nodes().Create(t.Context(),
		&core.Node{ObjectMeta: meta.ObjectMeta{Name: node}}, meta.CreateOptions{})
	require.NoError(t, err)
	k := &kubelet{client: c.client, echo: echo, folder: c.folder, pods: map[string]*pod{}}
	ctx, stop := context.WithCancel(context.Background())
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for ctx.Err() == nil {
			// What fails is tried again, as the namespace or a Secret may not exist yet.
			if err := k.turn(ctx); err != nil && ctx.Err() == nil {
				fmt.Fprintln(os.Stderr, "kubelet:", err)
			}
			time.Sleep(200 * time.Millisecond)
		}
	}()
	t.Cleanup(func() { stop(); <-stopped })
}

// turn starts the pods that are missing and stops those of Deployments that are gone.
func (k *kubelet) turn(ctx context.Context) error {
	deployments, err := k.client.AppsV1().Deployments("").List(ctx, meta.ListOptions{})
	if err != nil {
		return err
	}
	wanted := map[string]bool{}
	var failed error
	for i := range deployments.Items {
		deployment := &deployments.Items[i]
		for number := range int(*deployment.Spec.Replicas) {
			key := fmt.Sprintf("%s-%d", deployment.UID, number)
			wanted[key] = true
			if k.pods[key] != nil {
				continue
			}
			// As a ReplicaSet's, the name begins with that of the Deployment, and differs from that of any pod before.
			name := fmt.Sprintf("%s-%.5s-%d", deployment.Name, deployment.UID, number)
			if k.pods[key], err = k.start(ctx, deployment, name); err != nil {
				delete(k.pods, key)
				failed = fmt.Errorf("%s/%s: %w", deployment.Namespace, name, err)
			}
		}
	}
	for _, key := range slices.Collect(maps.Keys(k.pods)) {
		if !wanted[key] {
			k.stop(ctx, k.pods[key])
			delete(k.pods, key)
		}
	}
	return failed
}

func (k *kubelet) start(ctx context.Context, deployment *apps.Deployment, name string) (*pod, error) {
	p := &pod{namespace: deployment.Namespace, name: name}
	template := deployment.Spec.Template
	object := &core.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}
	object.Name, object.Namespace, object.Spec.NodeName = p.name, p.namespace, node
	pods := k.client.CoreV1().Pods(p.namespace)
	object, err := pods.Create(ctx, object, meta.CreateOptions{})
	if errors.IsAlreadyExists(err) {
		object, err = pods.Get(ctx, p.name, meta.GetOptions{})
	}
	if err != nil {
		return nil, err
	}
	if count := len(object.Spec.Containers); count != 1 {
		return nil, fmt.Errorf("it has %d containers, and this kubelet runs one", count)
	}
	container := object.Spec.Containers[0]
	if !strings.Contains(container.Image, "/echo-basic:") {
		return nil, fmt.Errorf("the image %s is not here", container.Image)
	}
	volumes, err := k.volumes(ctx, object)
	if err != nil {
		return nil, err
	}
	if err := k.run(p, container, volumes); err != nil {
		return nil, err
	}
	now := meta.Now()
	object.Status = core.PodStatus{
		Phase: core.PodRunning, PodIP: p.address, PodIPs: []core.PodIP{{IP: p.address}}, StartTime: &now,
		Conditions: []core.PodCondition{{Type: core.PodReady, Status: core.ConditionTrue, LastTransitionTime: now}},
	}
	if _, err = pods.UpdateStatus(ctx, object, meta.UpdateOptions{}); err != nil {
		k.kill(p)
		return nil, err
	}
	return p, nil
}

// volumes writes the Secrets that the pod mounts, and returns the folder of each volume.
func (k *kubelet) volumes(ctx context.Context, object *core.Pod) (map[string]string, error) {
	folders := map[string]string{}
	for _, volume := range object.Spec.Volumes {
		if volume.Secret == nil {
			return nil, fmt.Errorf("the volume %s is not a Secret", volume.Name)
		}
		secret, err := k.client.CoreV1().Secrets(object.Namespace).Get(ctx, volume.Secret.SecretName, meta.GetOptions{})
		if err != nil {
			return nil, err
		}
		folder := filepath.Join(k.folder, "volumes", object.Namespace, object.Name, volume.Name)
		if err := os.MkdirAll(folder, 0o700); err != nil {
			return nil, err
		}
		for _, item := range volume.Secret.Items {
			if err := os.WriteFile(filepath.Join(folder, item.Path), secret.Data[item.Key], 0o600); err != nil {
				return nil, err
			}
		}
		folders[volume.Name] = folder
	}
	return folders, nil
}

// run starts the echo server in a network namespace of its own, and connects the namespace to the bridge.
func (k *kubelet) run(p *pod, container core.Container, volumes map[string]string) error {
	k.started++
	p.address = fmt.Sprintf(podNetwork, 1+k.started/250, 1+k.started%250)
	command := exec.Command(k.echo)
	for _, variable := range container.Env {
		value := variable.Value
		if from := variable.ValueFrom; from != nil {
			value = map[string]string{"metadata.name": p.name, "metadata.namespace": p.namespace}[from.FieldRef.FieldPath]
		}
		for _, mount := range container.VolumeMounts {
			if rest, is := strings.CutPrefix(value, mount.MountPath); is {
				value = volumes[mount.Name] + rest
			}
		}
		command.Env = append(command.Env, variable.Name+"="+value)
	}
	command.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if err := command.Start(); err != nil {
		return err
	}
	p.process = command
	pid, link := strconv.Itoa(command.Process.Pid), fmt.Sprintf("pod%d", k.started)
	inside := func(arguments ...string) []string {
		return append([]string{"nsenter", "--net", "--target", pid, "ip"}, arguments...)
	}
	for _, step := range [][]string{
		{"ip", "link", "add", "name", link, "type", "veth", "peer", "name", "eth0", "netns", pid},
		{"ip", "link", "set", "dev", link, "master", "pods", "up"},
		inside("address", "add", p.address+"/16", "dev", "eth0"),
		inside("link", "set", "dev", "eth0", "up"),
	} {
		if output, err := exec.Command(step[0], step[1:]...).CombinedOutput(); err != nil {
			k.kill(p)
			return fmt.Errorf("%s: %w: %s", strings.Join(step, " "), err, output)
		}
	}
	return nil
}

func (k *kubelet) stop(ctx context.Context, p *pod) {
	k.kill(p)
	now := int64(0)
	err := k.client.CoreV1().Pods(p.namespace).Delete(ctx, p.name, meta.DeleteOptions{GracePeriodSeconds: &now})
	if err != nil && !errors.IsNotFound(err) && ctx.Err() == nil {
		fmt.Fprintln(os.Stderr, "kubelet:", err)
	}
}

func (k *kubelet) kill(p *pod) {
	_ = p.process.Process.Kill()
	_ = p.process.Wait()
}

func run(t *testing.T, program string, arguments ...string) {
	output, err := exec.Command(program, arguments...).CombinedOutput()
	require.NoError(t, err, "%s %v: %s", program, arguments, output)
}
