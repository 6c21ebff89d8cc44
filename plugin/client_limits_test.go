package plugin

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"slices"
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
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// attacker is a client of the plugin's socket other than the kubelet. Everything that it starts ends with the test.
type attacker struct {
	*harness
	ctx     context.Context //nolint:containedctx // ends the attack
	running sync.WaitGroup
}

// attack runs f during test, then ends what f has started.
func (h *harness) attack(f func(a *attacker), test func()) {
	ctx, end := context.WithCancel(h.ctx)
	a := &attacker{harness: h, ctx: ctx}
	defer a.running.Wait()
	defer end()
	f(a)
	test()
}

// client returns a client with a connection of its own.
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
	a.running.Go(func() { <-a.ctx.Done(); _ = conn.Close() })
	return pluginapi.NewDevicePluginClient(conn)
}

// raw returns a connection without gRPC.
func (a *attacker) raw() net.Conn {
	a.Helper()
	conn, err := new(net.Dialer).DialContext(a.ctx, "unix", a.socket())
	if err != nil {
		a.Fatal(err)
	}
	a.running.Go(func() { <-a.ctx.Done(); _ = conn.Close() })
	return conn
}

// repeat calls f until the attack ends.
func (a *attacker) repeat(f func()) {
	a.running.Go(func() {
		for a.ctx.Err() == nil {
			f()
		}
	})
}

// follow opens ListAndWatch and, with read, reads the lists. On a busy machine a handshake can take too long for the server: gRPC connects
// again.
func (a *attacker) follow(c pluginapi.DevicePluginClient, read bool) {
	a.running.Go(func() {
		stream, err := c.ListAndWatch(a.ctx, &pluginapi.Empty{}, grpc.WaitForReady(true))
		for err == nil && read {
			_, err = stream.Recv()
		}
	})
}

// preface starts an HTTP/2 connection without settings.
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"

const ping = "\x00\x00\x08\x06\x00\x00\x00\x00\x00abcdefgh"

// containersWith requests the same IDs for each of n containers.
func containersWith(n int, ids ...string) *pluginapi.AllocateRequest {
	return request(slices.Repeat([][]string{ids}, n)...)
}

// attacks are what clients do that are not the kubelet, by name.
var attacks = map[string]func(a *attacker){
	"2000 streams of one client": func(a *attacker) {
		c := a.client()
		for range 2000 {
			a.follow(c, true)
		}
		// The kubelet's, and as many as one client may have.
		a.waitStatus(func(s ResourceStatus) bool { return s.Streams == maxStreams+1 })
	},
	"100 clients": func(a *attacker) {
		for range 100 {
			a.follow(a.client(), true)
		}
		a.waitStatus(func(s ResourceStatus) bool { return s.Streams == 101 })
	},
	"clients that do not read": func(a *attacker) {
		for range 4 {
			// The smallest windows: some ten lists.
			c := a.client(grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(64<<10))
			for range maxStreams {
				a.follow(c, false)
			}
		}
		a.waitStatus(func(s ResourceStatus) bool { return s.Streams == 4*maxStreams+1 })
	},
	"connections that do not read": func(a *attacker) {
		for range 50 {
			conn := a.raw()
			a.running.Go(func() {
				for err := error(nil); err == nil; { // the answers fill the socket
					_, err = io.WriteString(conn, preface+strings.Repeat(ping, 100))
				}
			})
		}
	},
	"idle connections": func(a *attacker) {
		for range 300 {
			a.raw()
		}
	},
	"random bytes": func(a *attacker) {
		for range 2 {
			a.repeat(func() {
				conn, err := new(net.Dialer).DialContext(a.ctx, "unix", a.socket())
				if err != nil {
					return
				}
				_, _ = io.WriteString(conn, preface)
				_, _ = io.CopyN(conn, rand.Reader, 4096)
				_ = conn.Close()
			})
		}
	},
	"canceled streams": func(a *attacker) {
		c := a.client()
		for range 2 {
			a.repeat(func() {
				ctx, cancel := context.WithCancel(a.ctx)
				_, _ = c.ListAndWatch(ctx, &pluginapi.Empty{})
				cancel()
			})
		}
	},
	"large allocations": func(a *attacker) {
		c, giant, most := a.client(), containersWith(100_000), containersWith(maxContainers, id(0))
		if _, err := c.Allocate(a.ctx, giant); status.Code(err) != codes.ResourceExhausted {
			a.Errorf("100000 containers: %v", err)
		}
		if resp, err := c.Allocate(a.ctx, most); err != nil || len(resp.ContainerResponses) != maxContainers {
			a.Errorf("maxContainers: %v", err)
		}
		a.repeat(func() { _, _ = c.Allocate(a.ctx, giant) })
		a.repeat(func() { _, _ = c.Allocate(a.ctx, most) })
	},
	"many IDs": func(a *attacker) {
		c := a.client()
		for id, want := range map[string]codes.Code{id(0): codes.InvalidArgument, "x": codes.NotFound} {
			req := containersWith(1, slices.Repeat([]string{id}, 500_000)...)
			if _, err := c.Allocate(a.ctx, req); status.Code(err) != want {
				a.Errorf("500000 times %s: %v", id, err)
			}
			a.repeat(func() { _, _ = c.Allocate(a.ctx, req) })
		}
	},
	"large messages": func(a *attacker) {
		c, giant := a.client(), containersWith(1, strings.Repeat("x", maxRequestBytes))
		if _, err := c.Allocate(a.ctx, giant); status.Code(err) != codes.ResourceExhausted {
			a.Errorf("%d bytes: %v", maxRequestBytes, err)
		}
		a.repeat(func() { _, _ = c.Allocate(a.ctx, giant) })
	},
	"large metadata": func(a *attacker) {
		c := a.client()
		ctx := metadata.AppendToOutgoingContext(a.ctx, "bomb", strings.Repeat("x", 10*maxHeaderBytes))
		if _, err := c.GetDevicePluginOptions(ctx, &pluginapi.Empty{}); err == nil {
			a.Errorf("%d bytes of metadata were accepted", 10*maxHeaderBytes)
		}
		for range 2 {
			a.repeat(func() { _, _ = c.GetDevicePluginOptions(ctx, &pluginapi.Empty{}) })
		}
	},
}

// The kubelet gets its lists and allocations whatever other clients do.
func TestKubeletServedDuringAttacks(t *testing.T) {
	const replicas, devices = 100, 7 + 100
	for name, attack := range attacks {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, snapshot(8))
			h.setConfig(func(c *Config) {
				c.Sharing.TimeSlicing.Resources = []SharedResource{{Name: gpu, Replicas: replicas, Devices: []string{"7"}}}
			})
			k := h.kubelet()
			// A list that is late here is none to the audit, which would register again: there is no audit.
			k.SetFault(kubelettest.Fault{AllocatableError: "not implemented"})
			h.run()
			h.waitResource(k, gpu, listed(devices, devices))
			registrations := h.waitStatus(isRegistered).Registrations
			h.attack(attack, func() {
				var longest time.Duration
				for i := range 6 {
					state, want := health.Unhealthy, devices-1
					if i%2 == 1 {
						state, want = health.Healthy, devices
					}
					start := time.Now()
					h.setHealth(3, state)
					h.waitResource(k, gpu, listed(devices, want))
					longest = max(longest, time.Since(start))
				}
				if _, err := k.Allocate(h.ctx, gpu, 1); err != nil {
					t.Errorf("the kubelet cannot allocate: %v", err)
				}
				if s := h.waitStatus(isRegistered); s.Registrations != registrations {
					t.Errorf("%d registrations, before the attack %d", s.Registrations, registrations)
				}
				t.Logf("a change took at most %v", longest)
			})
		})
	}
}

func TestServerEndsPingFlood(t *testing.T) {
	t.Parallel()
	h, _ := startHarness(t, snapshot(1))
	var conn net.Conn
	h.attack(func(a *attacker) { conn = a.raw() }, func() {
		if _, err := io.WriteString(conn, preface+strings.Repeat(ping, 10)); err != nil {
			t.Fatal(err)
		}
		answer, err := io.ReadAll(conn)
		if errors.Is(err, context.Canceled) || !bytes.Contains(answer, []byte("too_many_pings")) { // of gRPC
			t.Errorf("ended with %v and %q", err, answer)
		}
	})
}

func TestServerEndsSilentConnections(t *testing.T) {
	t.Parallel()
	h := newHarness(t, snapshot(1))
	h.p.timing.handshake = shortTimeout
	h.register()
	var silent, partial net.Conn
	h.attack(func(a *attacker) { silent, partial = a.raw(), a.raw() }, func() {
		if _, err := io.WriteString(partial, preface[:10]); err != nil {
			t.Fatal(err)
		}
		for _, conn := range []net.Conn{silent, partial} {
			if _, err := io.ReadAll(conn); err != nil || h.ctx.Err() != nil {
				t.Errorf("not ended: %v, %v", err, h.ctx.Err())
			}
		}
	})
}
