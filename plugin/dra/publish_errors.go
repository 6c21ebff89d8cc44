package dra

import (
	"cmp"
	"errors"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.uber.org/zap"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/gpu-node-agent/gpu-node-agent/health/grouped"
)

// requiredRights names what the publisher requires of the API server, for the log.
const requiredRights = "get nodes; list, watch, create, update and delete resourceslices of API group resource.k8s.io"

// The reasons of failed requests.
const (
	reasonUnreachable = "unreachable" // no answer, or one that asks to retry
	reasonForbidden   = "forbidden"   // the agent lacks a right
	reasonUnsupported = "unsupported" // the API server is older than Kubernetes 1.34
	reasonNode        = "node"        // there is no Node object
	reasonInvalid     = "invalid"     // a slice is refused
	reasonDropped     = "dropped"     // fields were dropped
	reasonConflict    = "conflict"    // another writer was faster
	reasonOther       = "other"
)

// PublishErrors returns the reasons of Status.PublishErrors.
func PublishErrors() []string {
	return []string{
		reasonConflict, reasonDropped, reasonForbidden, reasonInvalid, reasonNode, reasonOther, reasonUnreachable, reasonUnsupported,
	}
}

// The errors of the API server that have a second meaning. They do not wrap it: the library takes "not found" for an old API server, and
// goes on with a beta API, whose fields differ.
var (
	errUnsupported = errors.New("the API server does not serve resource.k8s.io/v1; dynamic resource allocation needs Kubernetes 1.34 or newer")
	errNode        = errors.New("the API server has no Node object of this node")
	errDeleted     = errors.New("another writer has deleted the ResourceSlice")
)

// reasonOf returns the reason of an error, one of PublishErrors; empty for nil.
func reasonOf(err error) string {
	if err == nil {
		return ""
	}
	if _, dropped := errors.AsType[*resourceslice.DroppedFieldsError](err); dropped {
		return reasonDropped
	}
	status, answered := errors.AsType[*apierrors.StatusError](err)
	switch {
	case errors.Is(err, errUnsupported):
		return reasonUnsupported
	case errors.Is(err, errNode):
		return reasonNode
	case errors.Is(err, errDeleted):
		return reasonConflict
	case !answered:
		return reasonUnreachable
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return reasonForbidden
	case apierrors.IsInvalid(err):
		return reasonInvalid
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err):
		return reasonConflict
	case status.Status().Code >= http.StatusInternalServerError, apierrors.IsTooManyRequests(err):
		return reasonUnreachable
	}
	return reasonOther
}

// operation is what the publisher does at the API server.
type operation string

const (
	opConnect  operation = "connect"
	opWatch    operation = "watch"
	opSync     operation = "sync"
	opCleanUp  operation = "clean up" // slices of the node in a pool of another name
	opWithdraw operation = "withdraw"
)

// failures holds the operations that fail now, and counts all failures.
type failures struct {
	now    map[operation]error
	count  map[string]uint64 // by reason
	logged map[string]bool   // reasons, since all operations succeeded
}

func newFailures() failures {
	f := failures{now: make(map[operation]error), count: make(map[string]uint64), logged: make(map[string]bool)}
	for _, reason := range PublishErrors() {
		f.count[reason] = 0
	}
	return f
}

// add records a failure, and logs each reason once.
func (f *failures) add(op operation, err error, log *zap.Logger) {
	f.now[op] = err
	reason := reasonOf(err)
	f.count[reason]++
	if reason != reasonConflict && !f.logged[reason] { // a conflict ends with the next try
		f.logged[reason] = true
		log.Warn("cannot update ResourceSlices", zap.String("reason", reason), zap.Error(err), zap.String("required", requiredRights))
	}
}

// recovered records the success of an operation; whole is false while devices are refused.
func (f *failures) recovered(op operation, whole bool, log *zap.Logger) {
	delete(f.now, op)
	if whole && len(f.now) == 0 && len(f.logged) > 0 {
		clear(f.logged)
		log.Info("ResourceSlices are updated again")
	}
}

// text returns the errors of the operations that fail now; empty if none does.
func (f *failures) text() string {
	var texts []string
	for _, op := range slices.Sorted(maps.Keys(f.now)) {
		texts = append(texts, f.now[op].Error())
	}
	return strings.Join(slices.Compact(texts), "; ")
}

// refusedDevice is a device that the API server has refused.
type refusedDevice struct {
	device resourceapi.Device
	reason string
}

// refusalText names the refused devices; empty if there is none.
func refusalText(refusals map[string]refusedDevice) string {
	var reasons grouped.Texts
	for _, name := range slices.Sorted(maps.Keys(refusals)) {
		reasons.Addf(name, "not published, because the API server refuses it: %s", refusals[name].reason)
	}
	return strings.Join(reasons.NamesFirst(": "), "; ")
}

// pruneRefusals deletes the refusals of devices that are not, or not the same, in a pool.
func pruneRefusals(refusals map[string]refusedDevice, pool *Pool) {
	maps.DeleteFunc(refusals, func(name string, r refusedDevice) bool {
		for _, s := range pool.Slices {
			for _, d := range s.Devices {
				if d.Name == name {
					return !equality.Semantic.DeepEqual(d, r.device)
				}
			}
		}
		return true
	})
}

// refusedDevices returns the devices of a slice that the API server names in its refusal, all if it refuses the list. It is empty if
// the refusal has another cause, such as an admission policy: then no part of the slice is acceptable.
func refusedDevices(slice *resourceapi.ResourceSlice, err error) map[string]refusedDevice {
	status, ok := errors.AsType[*apierrors.StatusError](err)
	if !ok || !apierrors.IsInvalid(err) || status.Status().Details == nil {
		return nil
	}
	refused := make(map[string]refusedDevice)
	all := ""
	for _, cause := range status.Status().Details.Causes {
		match := deviceField.FindStringSubmatch(cause.Field)
		switch i, _ := strconv.Atoi(cmp.Or(append(match, "", "")[1], "-1")); {
		case match == nil:
		case i < 0:
			all = cmp.Or(all, cause.Message)
		case i < len(slice.Spec.Devices):
			d := slice.Spec.Devices[i]
			if _, has := refused[d.Name]; !has {
				refused[d.Name] = refusedDevice{d, cause.Field + ": " + cause.Message}
			}
		}
	}
	if len(refused) == 0 && all != "" {
		for _, d := range slice.Spec.Devices {
			refused[d.Name] = refusedDevice{d, "spec.devices: " + all}
		}
	}
	return refused
}

var deviceField = regexp.MustCompile(`^spec\.devices(?:\[(\d+)\].*)?$`)
