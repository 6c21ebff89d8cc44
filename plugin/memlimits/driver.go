package memlimits

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/backoff"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
)

// examinedDriver is the driver, and which devices it can limit.
type examinedDriver struct {
	open    Open
	limiter driver.MemoryLimiter // nil while it is not open
	release func()
	openErr error
	retry   retry // of open

	version  string // of the driver that was examined
	examined map[health.DeviceID]examination
	again    retry // of the examinations that failed: together, so that devices with the same result are logged together
}

// examination is the result for a device. A good one holds until the driver changes.
type examination struct {
	err      error
	presence health.Presence
}

// retry is when what failed is repeated.
type retry struct {
	at     time.Time
	pauses backoff.Backoff
}

func newRetry() retry { return retry{pauses: backoff.Backoff{Min: minRetry, Max: maxRetry}} }

func (r *retry) failed(now time.Time) { r.at = now.Add(r.pauses.Next()) }

func (d *examinedDriver) close() {
	if d.limiter != nil {
		d.release()
	}
}

// examine examines devices that were not examined yet. It repeats a device that failed when it is time, or at once if its presence has
// changed. A device that failed is repeated soon if it or its presence is new.
func (d *examinedDriver) examine(ctx context.Context, snap *health.Snapshot, now time.Time) {
	if version := snap.Source.Versions.Driver; d.examined == nil || version != d.version {
		d.version, d.examined, d.retry, d.again = version, make(map[health.DeviceID]examination), newRetry(), newRetry()
	}
	if d.limiter == nil && !now.Before(d.retry.at) {
		if d.limiter, d.release, d.openErr = d.open(); d.openErr != nil {
			d.retry.failed(now)
		}
	}
	if d.limiter == nil {
		return
	}
	current, due, failed := make(map[health.DeviceID]examination, len(snap.Devices)), !now.Before(d.again.at), false
	for i := range snap.Devices {
		if ctx.Err() != nil {
			return
		}
		id, presence := snap.Devices[i].Device.ID, snap.Devices[i].Sample.Presence
		e, examined := d.examined[id]
		changed := !examined || e.err != nil && e.presence != presence
		if changed || e.err != nil && due {
			e.presence = presence
			if e.err = errMIG; snap.Devices[i].Device.Kind != health.KindMIG {
				e.err = d.limiter.Supported(id)
			}
			if e.err != nil && changed {
				d.again.pauses.Reset()
			}
			failed = failed || e.err != nil
		}
		current[id] = e
	}
	if d.examined = current; failed {
		d.again.failed(now)
	}
}

var errMIG = errors.New("the driver has no memory limits of MIG devices")

// capabilities returns what can be enforced on the devices. cgroupErr is why the driver's limits cannot be used at all, setErr why the
// agent cannot set them.
func (d *examinedDriver) capabilities(snap *health.Snapshot, hooks map[health.DeviceID]bool, cgroupErr, setErr error) (c Capabilities) {
	c.Driver = make(map[health.DeviceID]string, len(snap.Devices))
	for i := range snap.Devices {
		id := snap.Devices[i].Device.ID
		e, examined := d.examined[id]
		err := cmp.Or(cgroupErr, e.err)
		if !examined {
			err = cmp.Or(cgroupErr, d.openErr)
		}
		if err == nil && !hooks[id] && setErr != nil {
			err = fmt.Errorf("nothing would set the limits: no CDI spec in use has the hook apply-cuda-memory-limits for the device, and the "+
				"agent cannot set them: %w", setErr)
		}
		if err != nil {
			c.Driver[id] = reasonOf(err, id)
			continue
		}
		c.Driver[id] = ""
		c.Hook = c.Hook || hooks[id]
	}
	return c
}

// reasonOf returns the text of an error without the device that it starts with, because devices have the same reason.
func reasonOf(err error, id health.DeviceID) string {
	return strings.TrimPrefix(err.Error(), string(id)+": ")
}
