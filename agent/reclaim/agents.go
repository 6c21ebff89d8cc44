package reclaim

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
)

const (
	agentTimeout = 10 * time.Second // of the response of one agent
	agentLimit   = 32               // agents that are asked at once
	askTimeout   = 3 * time.Minute  // of all agents: in a large cluster many may not respond
)

// agentNodes returns the nodes whose agents a plan needs: the nodes of pods that may hold GPUs.
func agentNodes(o Objects) []string {
	nodes := make(map[string]bool)
	for i := range o.Pods {
		extended := func(resource string) bool { return strings.Contains(resource, "/") }
		if p := &o.Pods[i]; p.Spec.NodeName != "" && !ended(p) && (len(p.Spec.ResourceClaims) > 0 || requestsAny(p, extended)) {
			nodes[p.Spec.NodeName] = true
		}
	}
	return slices.Sorted(maps.Keys(nodes))
}

// askNodes asks the agents of nodes by their URLs, and returns the responses and the errors.
func askNodes(ctx context.Context, nodes []string, urls map[string]string, access status.Access) (map[string]Agent, []string) {
	agents := make(map[string]Agent)
	var errs []string
	for i, a := range ask(ctx, nodes, func(n string) string { return urls[n] }, access) {
		n := nodes[i]
		if a.Err == nil && a.Status.Node != n {
			a = Agent{Err: fmt.Errorf("%s responds for node %s, expected node %s", urls[n], a.Status.Node, n)}
		}
		if a.Err != nil {
			errs = append(errs, "node "+n+": "+a.Err.Error())
		}
		agents[n] = a
	}
	return agents, errs
}

// askURLs asks the agents at URLs, and returns the responses by node, and the errors of agents without one. Two agents of one node are an
// error.
func askURLs(ctx context.Context, urls []string, access status.Access) (map[string]Agent, []string) {
	trimmed := make([]string, len(urls))
	for i, u := range urls {
		trimmed[i] = strings.TrimSuffix(strings.TrimRight(u, "/"), status.SnapshotPath)
	}
	slices.Sort(trimmed)
	trimmed = slices.Compact(trimmed)
	agents, from := make(map[string]Agent), make(map[string]string)
	var errs []string
	for i, a := range ask(ctx, trimmed, func(u string) string { return u }, access) {
		n := a.Status.Node
		switch {
		case a.Err != nil:
			errs = append(errs, a.Err.Error())
			continue
		case from[n] != "":
			a = Agent{Err: fmt.Errorf("%s and %s both respond for node %s; expected one agent", from[n], trimmed[i], n)}
			errs = append(errs, a.Err.Error())
		default:
			from[n] = trimmed[i]
		}
		agents[n] = a
	}
	return agents, errs
}

// ask asks the agents with keys, a few at once.
func ask(ctx context.Context, keys []string, url func(key string) string, access status.Access) []Agent {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	responses := make([]Agent, len(keys))
	slots := make(chan struct{}, agentLimit)
	var all sync.WaitGroup
	for i, k := range keys {
		slots <- struct{}{}
		if ctx.Err() != nil {
			<-slots
			responses[i].Err = fmt.Errorf("%s was not asked: the agents before it took %v", url(k), askTimeout)
			continue
		}
		all.Go(func() {
			defer func() { <-slots }()
			responses[i] = askAgent(ctx, url(k), access)
		})
	}
	all.Wait()
	return responses
}

func askAgent(ctx context.Context, url string, access status.Access) Agent {
	ctx, cancel := context.WithTimeout(ctx, agentTimeout)
	defer cancel()
	s, _, err := status.Ask(ctx, url, access)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		err = fmt.Errorf("%s did not respond within %v", url, agentTimeout)
	case err != nil:
	case s.Node == "" || s.Time.IsZero():
		err = fmt.Errorf("%s did not respond with a node status; expected the URL of an agent", url)
	}
	if err != nil {
		return Agent{Err: err}
	}
	return Agent{Status: slim(s)}
}

// responds reports whether one of the agents has responded.
func responds(agents map[string]Agent) bool {
	for _, a := range agents {
		if a.Err == nil {
			return true
		}
	}
	return false
}

// slim drops what no plan needs: there may be thousands of nodes.
func slim(s status.Node) status.Node {
	kept := status.Node{
		Node: s.Node, Version: s.Version, Time: s.Time, Source: s.Source, Kubelet: s.Kubelet, DRA: s.DRA,
		GPUs: slimDevices(s.GPUs),
	}
	kept.Source.Incidents, kept.Source.Events, kept.Kubelet.Warnings = nil, nil, nil
	if kept.DRA != nil {
		kept.DRA = &status.DRA{}
	}
	return kept
}

func slimDevices(devices []status.Device) []status.Device {
	var kept []status.Device
	for i := range devices {
		d := &devices[i]
		kept = append(kept, status.Device{UUID: d.UUID, Holders: d.Holders, AdminHolders: d.AdminHolders, MIG: slimDevices(d.MIG)})
	}
	return kept
}
