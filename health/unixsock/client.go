package unixsock

import (
	"bytes"
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

const maxResponse = 1 << 20 // bytes of a response's body

// ErrNoResponse is an error of Call: the server accepts connections, and does not respond or is another one.
var ErrNoResponse = errors.New("no response of a gpu-node-agent")

// Call sends a request for a route to the server at path. The request has body as JSON, or none if it is nil; the response is decoded into
// result unless that is nil or it has no content. If the server refuses the request, the error is a *StatusError with the server's text.
// Other errors are from dialing, or ErrNoResponse.
func Call(ctx context.Context, path, route string, body, result any) error {
	var text []byte
	if body != nil {
		var err error
		if text, err = json.Marshal(body); err != nil {
			return err
		}
	}
	method, target, _ := strings.Cut(route, " ")
	req, err := http.NewRequestWithContext(ctx, method, "http://"+product+target, bytes.NewReader(text))
	if err != nil {
		return err
	}
	err = exchange(path, req, result)
	if e, ok := errors.AsType[*url.Error](err); ok { // it names a URL, which says nothing here
		err = e.Err
	}
	op, isOp := errors.AsType[*net.OpError](err)
	if err == nil || errors.As(err, new(*StatusError)) || isOp && op.Op == "dial" {
		return err
	}
	return fmt.Errorf("%s: %w: %w", path, ErrNoResponse, err)
}

func exchange(path string, req *http.Request, result any) error {
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		},
	}}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxResponse))
	switch {
	case err != nil:
		return err
	case resp.Header.Get("Server") != product:
		return errors.New(resp.Status)
	case resp.StatusCode >= http.StatusBadRequest:
		return WithStatus(resp.StatusCode, errors.New(strings.TrimSuffix(string(text), "\n")))
	case result == nil, resp.StatusCode == http.StatusNoContent:
		return nil
	}
	return json.Unmarshal(text, result)
}
