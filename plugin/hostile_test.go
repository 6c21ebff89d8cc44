package plugin

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// attacker is a client of the plugin's socket other than the kubelet. What it starts ends with the test.
type attacker struct {
	*rig
	ctx  context.Context //nolint:containedctx // ends the attack
	busy sync.WaitGroup
}

// client returns a connection of its own.
func (a *attacker) client(opts ...grpc.DialOption) pluginapi.DevicePluginClient {
	a.Helper()
	opts = append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", a.socket())
		}),
	}, opts...)
	conn, err := grpc.NewClient("passthrough:///plugin", opts...)
	if err != nil {
		a.Fatal(err)
	}
	a.busy.Go(func() { <-a.ctx.Done(); _ = conn.Close() })
	return pluginapi.NewDevicePluginClient(conn)
}

// raw returns a connection that knows nothing of gRPC.
func (a *attacker) raw() net.Conn {
	a.Helper()
	conn, err := new(net.Dialer).DialContext(a.ctx, "unix", a.socket())
	if err != nil {
		a.Fatal(err)
	}
	a.busy.Go(func() { <-a.ctx.Done(); _ = conn.Close() })
	return conn
}

// again does something over and over for as long as the attack lasts.
func (a *attacker) again(what func()) {
	a.busy.Go(func() {
		for a.ctx.Err() == nil {
			what()
		}
	})
}

// follow opens ListAndWatch and reads it, or does not.
func (a *attacker) follow(c pluginapi.DevicePluginClient, read bool) {
	a.busy.Go(func() {
		stream, err := c.ListAndWatch(a.ctx, &pluginapi.Empty{})
		for err == nil && read {
			_, err = stream.Recv()
		}
	})
}

// hello is how HTTP/2 begins, with no settings.
const hello = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"

const ping = "\x00\x00\x08\x06\x00\x00\x00\x00\x00abcdefgh"

// TestHostileClients holds the kubelet's own stream against clients that only root could be.
func TestHostileClients(t *testing.T) {
	containers := func(n int, ids ...string) *pluginapi.AllocateRequest {
		req := &pluginapi.AllocateRequest{}
		for range n {
			req.ContainerRequests = append(req.ContainerRequests, &pluginapi.ContainerAllocateRequest{DevicesIds: ids})
		}
		return req
	}
	const replicas, all = 100, 7 + 100
	for name, attack := range map[string]func(a *attacker){
		"thousands of streams of one client": func(a *attacker) {
			c := a.client()
			for range 2000 {
				a.follow(c, true)
			}
			// The kubelet's, and as many of the client's as it may have at once.
			a.status(func(s ResourceStatus) bool { return s.Streams == maxStreams+1 })
		},
		"a hundred clients": func(a *attacker) {
			for range 100 {
				a.follow(a.client(), true)
			}
			a.status(func(s ResourceStatus) bool { return s.Streams == 101 })
		},
		"clients that do not read": func(a *attacker) {
			for range 4 {
				// All that a client takes whose streams are not read: some ten lists.
				c := a.client(grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(64<<10))
				for range maxStreams {
					a.follow(c, false)
				}
			}
			a.status(func(s ResourceStatus) bool { return s.Streams == 4*maxStreams+1 })
		},
		"connections that read no byte": func(a *attacker) {
			for range 50 {
				conn := a.raw()
				a.busy.Go(func() {
					for err := error(nil); err == nil; { // answers to pings fill the socket
						_, err = io.WriteString(conn, hello+strings.Repeat(ping, 100))
					}
				})
			}
		},
		"connections that say nothing": func(a *attacker) {
			for range 300 {
				a.raw()
			}
		},
		"noise": func(a *attacker) {
			for range 2 {
				a.again(func() {
					conn, err := new(net.Dialer).DialContext(a.ctx, "unix", a.socket())
					if err != nil {
						return
					}
					_, _ = io.WriteString(conn, hello)
					_, _ = io.CopyN(conn, rand.Reader, 4096)
					_ = conn.Close()
				})
			}
		},
		"streams that are given up at once": func(a *attacker) {
			c := a.client()
			for range 2 {
				a.again(func() {
					ctx, cancel := context.WithCancel(a.ctx)
					_, _ = c.ListAndWatch(ctx, &pluginapi.Empty{})
					cancel()
				})
			}
		},
		"giant allocations": func(a *attacker) {
			c, giant, most := a.client(), containers(100_000), containers(maxContainers, id(0))
			if _, err := c.Allocate(a.ctx, giant); status.Code(err) != codes.ResourceExhausted {
				a.Errorf("100000 containers: %v", err)
			}
			if resp, err := c.Allocate(a.ctx, most); err != nil || len(resp.ContainerResponses) != maxContainers {
				a.Errorf("as many containers as are allowed: %v", err)
			}
			a.again(func() { _, _ = c.Allocate(a.ctx, giant) })
			a.again(func() { _, _ = c.Allocate(a.ctx, most) })
		},
		"messages too large": func(a *attacker) {
			c, giant := a.client(), containers(1, strings.Repeat("x", maxRequestBytes))
			if _, err := c.Allocate(a.ctx, giant); status.Code(err) != codes.ResourceExhausted {
				a.Errorf("%d bytes: %v", maxRequestBytes, err)
			}
			a.again(func() { _, _ = c.Allocate(a.ctx, giant) })
		},
		"metadata": func(a *attacker) {
			c := a.client()
			ctx := metadata.AppendToOutgoingContext(a.ctx, "bomb", strings.Repeat("x", 10*maxHeaderBytes))
			if _, err := c.GetDevicePluginOptions(ctx, &pluginapi.Empty{}); err == nil {
				a.Errorf("%d bytes of metadata were taken", 10*maxHeaderBytes)
			}
			for range 2 {
				a.again(func() { _, _ = c.GetDevicePluginOptions(ctx, &pluginapi.Empty{}) })
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, snapshot(8))
			cfg := *r.cfg.Load()
			cfg.Sharing.TimeSlicing.Resources = []SharedResource{{Name: gpu, Replicas: replicas, Devices: []string{"7"}}}
			r.cfg.Store(&cfg)
			k := r.run().kubelet()
			r.wait(k, gpu, listed(all, all))
			registrations := r.status(isRegistered).Registrations

			ctx, end := context.WithCancel(r.ctx)
			a := &attacker{rig: r, ctx: ctx}
			defer a.busy.Wait()
			defer end()
			attack(a)
			worst := time.Duration(0)
			for i := range 6 {
				state, want := health.Unhealthy, all-1
				if i%2 == 1 {
					state, want = health.Healthy, all
				}
				begin := time.Now()
				r.snaps.Store(with(r.snaps.Load(), 3, state))
				r.wait(k, gpu, listed(all, want))
				worst = max(worst, time.Since(begin))
			}
			if _, err := k.Allocate(r.ctx, gpu, 1); err != nil {
				t.Errorf("the kubelet cannot allocate: %v", err)
			}
			// What the audit finds late on a slow machine is another matter.
			if s := r.status(isRegistered); s.Registrations > registrations+s.AuditMismatches {
				t.Errorf("%d registrations, and before the attack %d", s.Registrations, registrations)
			}
			t.Logf("news took at most %v", worst)
		})
	}
}

// TestPingsEnd: who pings all the time is told to calm down, and goes.
func TestPingsEnd(t *testing.T) {
	r := newRig(t, snapshot(1))
	k := r.run().kubelet()
	r.wait(k, gpu, listed(1, 1))
	ctx, end := context.WithCancel(r.ctx)
	a := &attacker{rig: r, ctx: ctx}
	defer a.busy.Wait()
	defer end()
	conn := a.raw()
	if _, err := io.WriteString(conn, hello+strings.Repeat(ping, 10)); err != nil {
		t.Fatal(err)
	}
	said, err := io.ReadAll(conn)
	if errors.Is(err, context.Canceled) || !bytes.Contains(said, []byte("too_many_pings")) {
		t.Errorf("ended with %v and %q", err, said)
	}
}

// TestSilenceEnds: who opens a connection and does not speak HTTP/2 is not kept. It takes handshakeWithin.
func TestSilenceEnds(t *testing.T) {
	t.Parallel()
	r := newRig(t, snapshot(1))
	k := r.run().kubelet()
	r.wait(k, gpu, listed(1, 1))
	ctx, end := context.WithCancel(r.ctx)
	a := &attacker{rig: r, ctx: ctx}
	defer a.busy.Wait()
	defer end()
	half := a.raw()
	if _, err := io.WriteString(half, hello[:10]); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	for _, conn := range []net.Conn{a.raw(), half} {
		if _, err := io.ReadAll(conn); err != nil || r.ctx.Err() != nil {
			t.Errorf("not ended: %v, %v", err, r.ctx.Err())
		}
	}
	if took := time.Since(begin); took > 2*handshakeWithin {
		t.Errorf("ended after %v, want %v", took, handshakeWithin)
	}
}

// TestSocketIsRootsOwn: nobody else may connect to the socket of a resource, whatever the umask is.
func TestSocketIsRootsOwn(t *testing.T) {
	r := newRig(t, snapshot(1))
	k := r.run().kubelet()
	r.wait(k, gpu, listed(1, 1))
	info, err := os.Stat(r.socket())
	if err != nil || info.Mode() != os.ModeSocket|0o600 {
		t.Errorf("%v, %v", info, err)
	}
}
