package agent

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/prometheus/exporter-toolkit/web"
	"go.yaml.in/yaml/v3"
)

// webConfig is what metrics.webConfigFile says, and what the files that it names hold. The format, its checks
// and what it makes of TLS are exporter-toolkit's, but for one thing: that reads the files anew for each request
// and each connection, and answers nobody while they are bad. Here they are a part of the configuration, so that
// bad ones change nothing.
type webConfig struct {
	tls   *tls.Config // nil: plain HTTP
	http2 bool
	users map[string][]byte // the hash of each one's password, by bcrypt; none: everybody is let in
	rest  web.Config        // headers and the rate limit
	sum   [sha256.Size]byte // of all that it was made from; that of plain HTTP for everybody is zero
}

// loadWebConfig reads a web configuration; "" is plain HTTP for everybody.
func loadWebConfig(file string) (*webConfig, error) {
	if file == "" {
		return &webConfig{}, nil
	}
	w, err := readWebConfig(file)
	if err != nil {
		return nil, fmt.Errorf("webConfigFile: %s: %w", file, err)
	}
	return w, nil
}

func readWebConfig(file string) (*webConfig, error) {
	sum := sha256.Sum256(webText(file)) // first: what changes from now on is another sum at the next look
	if err := web.Validate(file); err != nil {
		return nil, err
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	w := &webConfig{sum: sum, users: make(map[string][]byte)}
	// The defaults are exporter-toolkit's.
	c := web.Config{
		TLSConfig:  web.TLSConfig{MinVersion: tls.VersionTLS12, MaxVersion: tls.VersionTLS13},
		HTTPConfig: web.HTTPConfig{HTTP2: true},
	}
	if err := yaml.Unmarshal(text, &c); err != nil {
		return nil, err
	}
	c.TLSConfig.SetDirectory(filepath.Dir(file))
	w.rest, w.http2 = c, c.HTTPConfig.HTTP2
	for name, hash := range c.Users {
		w.users[name] = []byte(hash)
	}
	if c.TLSConfig.IsEnabled() {
		w.tls, err = serverTLS(&c.TLSConfig, w.http2)
	}
	return w, err
}

// applyWeb puts a web configuration in force, if it is another; nil is plain HTTP for everybody.
func (a *Agent) applyWeb(w *webConfig) {
	if w == nil {
		w = &webConfig{}
	}
	if was := a.web.Load(); was == nil || was.sum != w.sum {
		a.web.Store(w)
	}
}

// serverTLS is what exporter-toolkit makes of the file, with the certificate as it is now.
func serverTLS(c *web.TLSConfig, http2 bool) (*tls.Config, error) {
	t, err := web.ConfigToTLSConfig(c)
	if err != nil {
		return nil, err
	}
	cert, err := t.GetCertificate(nil)
	if err != nil {
		return nil, err
	}
	t.Certificates, t.GetCertificate = []tls.Certificate{*cert}, nil
	if t.ClientCAs != nil && t.ClientCAs.Equal(x509.NewCertPool()) {
		return nil, errors.New("tls_server_config.client_ca_file: holds no certificate; put in the PEM of who signs those of clients")
	}
	// net/http would refuse to serve: RFC 9113, 9.2.2 wants one of these.
	good := []uint16{tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256}
	if http2 && t.CipherSuites != nil && !slices.ContainsFunc(t.CipherSuites, func(c uint16) bool { return slices.Contains(good, c) }) {
		return nil, fmt.Errorf("tls_server_config.cipher_suites: HTTP/2 needs %s or %s; add one, or set http_server_config.http2 to false",
			tls.CipherSuiteName(good[0]), tls.CipherSuiteName(good[1]))
	}
	return t, nil
}

// webText is what a web configuration and the files that it names hold now: if it is another, there is something
// to load. What cannot be read holds nothing.
func webText(file string) []byte {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil
	}
	var c web.Config
	_ = yaml.Unmarshal(text, &c) // said when it is loaded; what could be read is there
	c.TLSConfig.SetDirectory(filepath.Dir(file))
	all := [][]byte{text}
	for _, name := range []string{c.TLSConfig.TLSCertPath, c.TLSConfig.TLSKeyPath, c.TLSConfig.ClientCAs} {
		var more []byte
		if name != "" {
			more, _ = os.ReadFile(name) // as above
		}
		all = append(all, more)
	}
	return bytes.Join(all, []byte{0})
}
