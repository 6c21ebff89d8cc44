package cdi

import (
	"regexp"
	"strconv"
)

// The values of Config.Runtime.
const (
	RuntimeAuto      = "auto"      // judge by the version
	RuntimeSupported = "supported" // somebody has looked: a setting on which CDI depends is set
)

// Runtime is the container runtime of a node and its kubelet, as the Node object has them.
type Runtime struct {
	Version string // containerd://2.1.4; empty if it is unknown
	Kubelet string // v1.34.1
	Err     string // why the version is unknown; empty if the Node has been read
	Away    bool   // of Err: the API server does not answer yet
}

// Support is what a container runtime does with the devices that a container gets by CDI names.
type Support uint8

// The values of Support.
const (
	SupportUnknown Support = iota // the version is unknown, or nothing is known of the runtime
	SupportIgnored                // it starts containers without these devices, and without an error
	SupportDepends                // it does so unless a setting on the host is set, which no pod sees
	Supported
)

// String returns the value of a label.
func (s Support) String() string {
	switch s {
	case SupportIgnored:
		return "ignored"
	case SupportDepends:
		return "depends"
	case Supported:
		return "supported"
	case SupportUnknown:
	}
	return "unknown"
}

// RuntimeVerdict is what is known of the support of CDI by a container runtime.
type RuntimeVerdict struct {
	Support Support
	Found   string // why, as a clause
	Fix     string // what to do; empty if nothing needs to be done

	EnableCDI bool // the setting on which it depends is enable_cdi
}

// String returns what was found and what to do.
func (v RuntimeVerdict) String() string {
	if v.Fix == "" {
		return v.Found
	}
	return v.Found + "; " + v.Fix
}

// Refusal returns why pods must not get devices by CDI names; empty if they may.
func (v RuntimeVerdict) Refusal() string { return v.textIf(SupportIgnored) }

// Warning returns what somebody must look at; empty if there is nothing.
func (v RuntimeVerdict) Warning() string { return v.textIf(SupportDepends) }

func (v RuntimeVerdict) textIf(s Support) string {
	if v.Support != s {
		return ""
	}
	return v.String()
}

// containerdVersion matches a release of containerd, with its suffix: 1.7.27-0ubuntu1, 1.6.20~ds1, 2.0.0-rc.1.
var containerdVersion = regexp.MustCompile(`^containerd://v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?((?:[-.+~].*)?)$`)

// early matches the suffix of a pre-release before the release candidates.
var early = regexp.MustCompile(`^[-~.]?(alpha|beta)`)

// Judge returns what the runtime does with CDI names. annotated means that the container also has the names in an annotation, from which
// NVIDIA's container runtime takes them itself. Whatever Config.Runtime is, a release that does not have CDI ignores it.
//
// containerd has CDI since 1.7, where enable_cdi switches it on, and has it on since 2.0.0-beta.2 (containerd pull requests 6654 and 9621).
func (c Config) Judge(r Runtime, annotated bool) RuntimeVerdict {
	m := containerdVersion.FindStringSubmatch(r.Version)
	switch {
	case r.Version == "" && r.Err == "":
		return RuntimeVerdict{Found: "the Node does not have the version of the container runtime"}
	case r.Version == "":
		return RuntimeVerdict{Found: "the version of the container runtime is unknown: " + r.Err}
	case m == nil:
		return RuntimeVerdict{Found: "it is unknown whether the container runtime " + r.Version + " supports CDI devices"}
	}
	major, _ := strconv.Atoi(m[1])
	minor, _ := strconv.Atoi(m[2])
	patch, _ := strconv.Atoi(m[3])
	without := major < 1 || major == 1 && minor < 7
	byDefault := major > 2 || major == 2 && (minor > 0 || patch > 0 || !early.MatchString(m[4]))

	const upgrade, looked = "upgrade it to containerd 2", "if that is so, set plugin.cdi.runtime to " + RuntimeSupported + "; otherwise "
	ignores := "the container runtime " + r.Version + " ignores CDI devices, and pods would run without their GPU"
	switch {
	case without && !annotated:
		return RuntimeVerdict{Support: SupportIgnored, Found: ignores, Fix: upgrade}
	case byDefault, c.Runtime == RuntimeSupported:
		return RuntimeVerdict{Support: Supported, Found: "the container runtime " + r.Version + " supports CDI devices"}
	case without:
		return RuntimeVerdict{
			Support: SupportDepends, Found: ignores + ", unless NVIDIA's container runtime is its default and gets the annotations of containers",
			Fix: looked + upgrade,
		}
	}
	return RuntimeVerdict{
		Support: SupportDepends, Found: ignores + ", unless its configuration has enable_cdi = true", EnableCDI: true,
		Fix: looked + upgrade + ", or set enable_cdi with 1.7.2 or newer",
	}
}

// annotatesUntil is the first minor version of Kubernetes 1 whose kubelet gives the CDI names of a device plugin to the container runtime
// in the field of the CRI only. Earlier ones also annotate the container (kubernetes pull request 126435).
const annotatesUntil = 32

var kubeletVersion = regexp.MustCompile(`^v1\.(\d{1,4})\.`)

// KubeletAnnotates reports whether the kubelet may give the CDI names of a device plugin to the runtime in an annotation too.
func (r Runtime) KubeletAnnotates() bool {
	m := kubeletVersion.FindStringSubmatch(r.Kubelet)
	if m == nil {
		return true // unknown
	}
	minor, _ := strconv.Atoi(m[1])
	return minor < annotatesUntil
}
