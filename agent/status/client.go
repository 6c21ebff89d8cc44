package status

import (
	"cmp"
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
func Ask(ctx context.Context, address string, access Access) (s Node, document []byte, err error) {
	code, document, err := access.Get(ctx, address, SnapshotPath)
	if err != nil {
		return Node{}, nil, err
	}
	switch {
	case code == http.StatusUnauthorized && access.User != "":
		err = fmt.Errorf("%s rejected the login; check --user and the password in $%s", address, PasswordEnv)
	case code == http.StatusUnauthorized:
		err = fmt.Errorf("%s requires a login; use --user NAME with the password in $%s", address, PasswordEnv)
	case code == http.StatusBadRequest && strings.Contains(string(document), "HTTPS"):
		err = fmt.Errorf("%s requires TLS; use https://HOST:PORT", address)
	case code != http.StatusOK:
		err = fmt.Errorf("%s responded to %s with %d; expected an agent of this version", address, SnapshotPath, code)
	default:
		if err = json.Unmarshal(document, &s); err != nil {
			err = fmt.Errorf("%s did not respond with a node status: %w", address, err)
		}
	}
	return s, document, err
}

// Get requests a path from the agent at an address. It returns the status code and the body.
func (a Access) Get(ctx context.Context, address, path string) (int, []byte, error) {
	base := strings.TrimRight(address, "/")
	if !strings.HasPrefix(base, "http://") && !strings.HasPrefix(base, "https://") {
		host, err := dialAddress(address)
		if err != nil {
			return 0, nil, fmt.Errorf("--address: invalid address %q; use HOST:PORT, :PORT or a URL", address)
		}
		base = "http://" + host
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+path, nil)
	if err != nil {
		return 0, nil, fmt.Errorf("--address: %w", err)
	}
	client, err := a.client()
	if err != nil {
		return 0, nil, err
	}
	if a.User != "" {
		req.SetBasicAuth(a.User, a.Password)
	}
	res, err := client.Do(req)
	if err != nil {
		if u, ok := errors.AsType[*url.Error](err); ok {
			err = u.Err // without the URL, which may contain a password
		}
		advice := cmp.Or(hint(err), "; check that it runs and listens there (metrics.listen), or run gpu-node-agent doctor")
		return 0, nil, fmt.Errorf("cannot reach an agent at %s: %w%s", req.URL.Host, err, advice)
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(res.Body, maxSnapshot))
	if err != nil {
		return 0, nil, fmt.Errorf("incomplete response from %s: %w", req.URL.Host, err)
	}
	return res.StatusCode, body, nil
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
