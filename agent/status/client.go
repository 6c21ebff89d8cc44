package status

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
)

const (
	// SnapshotPath is the path of the status as JSON.
	SnapshotPath = "/api/v1/snapshot"
	maxSnapshot  = 16 << 20 // far more than 32 GPUs with 7 MIG devices each have to say
)

// Ask asks the agent that serves at the address, which is HOST:PORT, :PORT or a URL, how the node is. It
// returns the answer, and the JSON that it came in.
func Ask(ctx context.Context, address string, access Access) (Node, []byte, error) {
	base, err := URL(address)
	if err != nil {
		return Node{}, nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+SnapshotPath, nil)
	if err != nil {
		return Node{}, nil, fmt.Errorf("--address: %w", err)
	}
	client, err := access.Client()
	if err != nil {
		return Node{}, nil, err
	}
	if access.User != "" {
		req.SetBasicAuth(access.User, access.Password)
	}
	res, err := client.Do(req)
	if err != nil {
		if u, ok := errors.AsType[*url.Error](err); ok {
			err = u.Err // which has no password in it
		}
		if hint := hint(err); hint != "" {
			return Node{}, nil, fmt.Errorf("%s: %w%s", req.URL.Host, err, hint)
		}
		return Node{}, nil, fmt.Errorf("no agent answers at %s: %w; is it running, and is that its metrics.listen? see gpu-node-agent doctor", req.URL.Host, err)
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(res.Body, maxSnapshot))
	if err != nil {
		return Node{}, nil, fmt.Errorf("the answer of %s breaks off: %w", req.URL.Host, err)
	}
	var s Node
	switch {
	case res.StatusCode == http.StatusUnauthorized && access.User != "":
		err = fmt.Errorf("%s does not take this name and password; see --user, and the password in $%s", req.URL.Host, PasswordEnv)
	case res.StatusCode == http.StatusUnauthorized:
		err = fmt.Errorf("%s wants a name and a password; use --user NAME, with the password in $%s", req.URL.Host, PasswordEnv)
	case res.StatusCode == http.StatusBadRequest && strings.Contains(string(text), "HTTPS"):
		err = fmt.Errorf("%s speaks TLS; use --address https://HOST:PORT", req.URL.Host)
	case res.StatusCode != http.StatusOK:
		err = fmt.Errorf("%s says %s to %s; it is no agent of this version", req.URL.Host, res.Status, SnapshotPath)
	default:
		if err = json.Unmarshal(text, &s); err != nil {
			err = fmt.Errorf("what %s answers is not a snapshot: %w", req.URL.Host, err)
		}
	}
	return s, text, err
}

// URL returns the base URL of an agent's address, which is HOST:PORT, :PORT or a URL.
func URL(address string) (string, error) {
	if strings.HasPrefix(address, "http://") || strings.HasPrefix(address, "https://") {
		return strings.TrimRight(address, "/"), nil
	}
	host, err := dialAddress(address)
	if err != nil {
		return "", fmt.Errorf("--address: %q is not an address; use HOST:PORT, :PORT or a URL", address)
	}
	return "http://" + host, nil
}

// dialAddress is where to reach a server that listens at an address: all addresses are reached on this host.
func dialAddress(listen string) (string, error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return "", err
	}
	if ip := net.ParseIP(host); host == "" || ip.IsUnspecified() {
		host = "localhost"
	}
	return net.JoinHostPort(host, port), nil
}
