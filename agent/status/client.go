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
	maxSnapshot  = 16 << 20 // far more than the status of 32 GPUs with 7 MIG devices each
)

// Ask requests the status of a node from the agent at an address, which is HOST:PORT, :PORT or a URL. It also returns
// the JSON document.
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
			err = u.Err // without the URL, which may contain a password
		}
		if hint := hint(err); hint != "" {
			return Node{}, nil, fmt.Errorf("%s: %w%s", req.URL.Host, err, hint)
		}
		return Node{}, nil, fmt.Errorf("cannot reach an agent at %s: %w; check that it runs and listens there (metrics.listen), or run gpu-node-agent doctor", req.URL.Host, err)
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(res.Body, maxSnapshot))
	if err != nil {
		return Node{}, nil, fmt.Errorf("incomplete response from %s: %w", req.URL.Host, err)
	}
	var s Node
	switch {
	case res.StatusCode == http.StatusUnauthorized && access.User != "":
		err = fmt.Errorf("%s rejected the login; check --user and the password in $%s", req.URL.Host, PasswordEnv)
	case res.StatusCode == http.StatusUnauthorized:
		err = fmt.Errorf("%s requires a login; use --user NAME with the password in $%s", req.URL.Host, PasswordEnv)
	case res.StatusCode == http.StatusBadRequest && strings.Contains(string(text), "HTTPS"):
		err = fmt.Errorf("%s requires TLS; use --address https://HOST:PORT", req.URL.Host)
	case res.StatusCode != http.StatusOK:
		err = fmt.Errorf("%s responded to %s with %s; expected an agent of this version", req.URL.Host, SnapshotPath, res.Status)
	default:
		if err = json.Unmarshal(text, &s); err != nil {
			err = fmt.Errorf("%s did not respond with a node status: %w", req.URL.Host, err)
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
		return "", fmt.Errorf("--address: invalid address %q; use HOST:PORT, :PORT or a URL", address)
	}
	return "http://" + host, nil
}

// dialAddress returns the address of a server on this host by its listen address: an unspecified host is localhost.
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
