package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"time"
)

// get returns a page's text.
func get(ctx context.Context, url string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", url, res.Status)
	}
	return string(text), err
}

// short leaves out of a series what every series has.
func short(line string) string {
	line = regexp.MustCompile(`(GPU_I_ID|GPU_I_PROFILE|hostname)="[^"]*",`).ReplaceAllString(line, "")
	return regexp.MustCompile(`UUID="(GPU-[0-9a-f]{8})[^"]*"`).ReplaceAllString(line, `UUID="$1…"`)
}
