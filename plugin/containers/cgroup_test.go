package containers

import (
	"regexp"
	"strings"
	"testing"
)

const (
	podUID   = "0f4b7c1e-2d3a-4b5c-8d9e-0a1b2c3d4e5f"
	otherUID = "7a1b2c3d-4e5f-4a6b-9c8d-1e2f3a4b5c6d"
	staticID = "9f86d081884c7d659a2feaa0c55ad015"
	id       = "3b4c5d6e7f8091a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f7081920"
	otherID  = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
)

var systemdUID = strings.ReplaceAll(podUID, "-", "_")

func TestParseCgroup(t *testing.T) {
	slice := "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + systemdUID + ".slice"
	for name, test := range map[string]struct {
		text string
		want Ref // zero: no pod
	}{
		"v2 systemd containerd":      {"0::" + slice + "/cri-containerd-" + id + ".scope\n", Ref{podUID, id}},
		"v2 systemd CRI-O":           {"0::" + slice + "/crio-" + id + ".scope\n", Ref{podUID, id}},
		"v2 systemd CRI-O with crun": {"0::" + slice + "/crio-" + id + ".scope/container\n", Ref{podUID, id}},
		"v2 systemd cri-dockerd":     {"0::" + slice + "/docker-" + id + ".scope\n", Ref{podUID, id}},
		"v2 systemd guaranteed": {
			"0::/kubepods.slice/kubepods-pod" + systemdUID + ".slice/cri-containerd-" + id + ".scope\n",
			Ref{podUID, id},
		},
		"v2 cgroupfs":            {"0::/kubepods/burstable/pod" + podUID + "/" + id + "\n", Ref{podUID, id}},
		"v2 cgroupfs guaranteed": {"0::/kubepods/pod" + podUID + "/" + id + "\n", Ref{podUID, id}},
		"v2 cgroupfs CRI-O":      {"0::/kubepods/besteffort/pod" + podUID + "/crio-" + id + "\n", Ref{podUID, id}},
		"no final newline":       {"0::/kubepods/pod" + podUID + "/" + id, Ref{podUID, id}},
		"static pod":             {"0::/kubepods.slice/kubepods-pod" + staticID + ".slice/cri-containerd-" + id + ".scope\n", Ref{staticID, id}},
		"cgroupfs runtime, systemd kubelet": {"0::/system.slice/containerd.service/kubepods-burstable-pod" + systemdUID +
			".slice:cri-containerd:" + id + "\n", Ref{podUID, id}},
		"kind": {"0::/docker/" + otherID +
			"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod" + systemdUID +
			".slice/cri-containerd-" + id + ".scope\n", Ref{podUID, id}},
		"kind with cgroupfs": {"0::/docker/" + otherID + "/kubelet/kubepods/besteffort/pod" + podUID + "/" + id + "\n", Ref{podUID, id}},
		"k3s":                {"0::/kubepods/besteffort/pod" + podUID + "/" + id + "\n", Ref{podUID, id}},
		"nested in the container": {
			"0::" + slice + "/cri-containerd-" + id + ".scope/user.slice/docker-" + otherID + ".scope\n",
			Ref{podUID, id},
		},
		"pod inside the container": {
			"0::" + slice + "/cri-containerd-" + id + ".scope/kubepods/pod" + otherUID + "/" + otherID + "\n",
			Ref{podUID, id},
		},
		"kata sandbox": {"0::" + slice + "/kata_overhead\n", Ref{podUID, ""}},
		"pod itself":   {"0::" + slice + "\n", Ref{podUID, ""}},
		"removed":      {"0::" + slice + "/cri-containerd-" + id + ".scope (deleted)\n", Ref{podUID, ""}},

		// As an agent in a cgroup namespace of its own reads it.
		"namespace systemd": {"0::/../../../kubepods-besteffort.slice/kubepods-besteffort-pod" + systemdUID +
			".slice/cri-containerd-" + id + ".scope\n", Ref{podUID, id}},
		"namespace systemd, same class": {
			"0::/../../kubepods-burstable-pod" + systemdUID + ".slice/cri-containerd-" + id + ".scope\n",
			Ref{podUID, id},
		},
		"namespace cgroupfs, same class":  {"0::/../../pod" + podUID + "/" + id + "\n", Ref{podUID, id}},
		"namespace cgroupfs, other class": {"0::/../../../burstable/pod" + podUID + "/" + id + "\n", Ref{podUID, id}},
		"namespace, agent's own pod":      {"0::/../cri-containerd-" + id + ".scope\n", Ref{}},
		"namespace, host":                 {"0::/../../../../system.slice/nvidia-persistenced.service\n", Ref{}},

		"v1": {
			"12:memory:/kubepods/burstable/pod" + podUID + "/" + id + "\n11:cpu,cpuacct:/kubepods/burstable/pod" + podUID + "/" + id +
				"\n1:name=systemd:/kubepods/burstable/pod" + podUID + "/" + id + "\n", Ref{podUID, id},
		},
		"v1 systemd": {
			"5:devices:" + slice + "/docker-" + id + ".scope\n1:name=systemd:" + slice + "/docker-" + id + ".scope\n",
			Ref{podUID, id},
		},
		"hybrid": {"3:cpu:/kubepods/pod" + podUID + "/" + id + "\n1:name=systemd:/\n0::/\n", Ref{podUID, id}},
		"v1, one hierarchy without the container": {
			"3:cpu:/kubepods/pod" + podUID + "\n2:devices:/kubepods/pod" + podUID + "/" + id + "\n", Ref{podUID, id},
		},

		"two pods":        {"3:cpu:/kubepods/pod" + podUID + "/" + id + "\n2:devices:/kubepods/pod" + otherUID + "/" + id + "\n", Ref{}},
		"two containers":  {"3:cpu:/kubepods/pod" + podUID + "/" + id + "\n2:devices:/kubepods/pod" + podUID + "/" + otherID + "\n", Ref{}},
		"host":            {"0::/system.slice/nvidia-dcgm.service\n", Ref{}},
		"user":            {"0::/user.slice/user-1000.slice/session-3.scope\n", Ref{}},
		"podman":          {"0::/machine.slice/libpod-" + id + ".scope\n", Ref{}},
		"docker":          {"0::/system.slice/docker-" + id + ".scope\n", Ref{}},
		"short UID":       {"0::/kubepods/pod" + podUID[1:] + "/" + id + "\n", Ref{}},
		"UID with suffix": {"0::/kubepods/pod" + podUID + "x/" + id + "\n", Ref{}},
		"root":            {"0::/\n", Ref{}},
		"empty":           {"", Ref{}},
		"not a cgroup":    {"pod" + podUID + "\n", Ref{}},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := ParseCgroup(test.text)
			if got != test.want || ok != (test.want != Ref{}) {
				t.Errorf("%+v, %v, want %+v", got, ok, test.want)
			}
		})
	}
}

// FuzzParseCgroup parses any text. A result is a UID and an ID as Kubernetes writes them, and occurs in the text. A container that
// creates groups below its own stays the container of its processes.
func FuzzParseCgroup(f *testing.F) {
	for _, text := range []string{
		"0::/kubepods/pod" + podUID + "/" + id + "\n", "0::/../../kubepods-pod" + systemdUID + ".slice/crio-" + id + ".scope\n",
		"2:a:/pod" + podUID + "\n1:b:/pod" + otherUID + "\n", "0::/x:y-pod" + systemdUID + ".slice:cri-containerd:" + id, "::", "\x00",
		"0::/pod/pod-/" + id,
	} {
		f.Add(text, "pod"+otherUID+"/"+otherID)
	}
	uid := regexp.MustCompile(`^([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32})$`)
	runtimeID := regexp.MustCompile(`^([0-9a-f]{64})?$`)
	f.Fuzz(func(t *testing.T, text, below string) {
		c, ok := ParseCgroup(text)
		if !ok {
			if c != (Ref{}) {
				t.Errorf("%+v although it names no pod", c)
			}
		} else if !uid.MatchString(c.Pod) || !runtimeID.MatchString(c.ID) || !strings.Contains(strings.ReplaceAll(text, "_", "-"), c.Pod) ||
			!strings.Contains(text, c.ID) {
			t.Errorf("invalid: %+v", c)
		}
		if strings.ContainsAny(below, "\n") {
			return
		}
		own := "0::/kubepods/pod" + podUID + "/" + id + "/" + below + "\n"
		if c, ok := ParseCgroup(own); !ok || c != (Ref{podUID, id}) {
			t.Errorf("%q changes the container: %+v", below, c)
		}
	})
}
