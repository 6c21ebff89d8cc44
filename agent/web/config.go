package web

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/prometheus/exporter-toolkit/web"
	"go.yaml.in/yaml/v3"
)

// Config is the content of metrics.webConfigFile and of the files that it names. The zero Config is plain HTTP without
// passwords.
//
// The file format, its validation and the TLS settings are exporter-toolkit's. Its server is not used: it cannot exempt the probes from the
// password. Besides, it reads the files anew for each request, and fails every request while they are invalid. Here the files are part of
// the configuration, and an invalid one changes nothing.
type Config struct {
	tls      *tls.Config       // nil: plain HTTP
	users    map[string][]byte // bcrypt hashes by user name; empty: no password is needed
	settings web.Config        // headers, HTTP/2 and the rate limit
	text     []byte            // of the file
	sum      [sha256.Size]byte // of the content of all files; zero for plain HTTP
}

// LoadConfig reads a web configuration file. An empty name returns the zero Config.
func LoadConfig(file string) (c *Config, err error) {
	if file == "" {
		return &Config{}, nil
	}
	text, err := os.ReadFile(file)
	if err == nil {
		err = web.Validate(file)
	}
	if err != nil {
		return nil, fmt.Errorf("webConfigFile: %s: %w", file, err)
	}
	return ParseConfig(file, text)
}

// ParseConfig returns the configuration that a file has with a text that LoadConfig accepted earlier. Relative names in it
// are below the file's directory. exporter-toolkit's own validation reads only files, so ParseConfig does not repeat all of
// it.
func ParseConfig(file string, text []byte) (c *Config, err error) {
	defer func() {
		if err != nil {
			c, err = nil, fmt.Errorf("webConfigFile: %s: %w", file, err)
		}
	}()
	// The sum is first: a change during the load then shows up as a different sum.
	c = &Config{sum: sha256.Sum256(contentOf(file, text)), text: text, users: make(map[string][]byte)}
	// The defaults are exporter-toolkit's.
	c.settings = web.Config{
		TLSConfig:  web.TLSConfig{MinVersion: tls.VersionTLS12, MaxVersion: tls.VersionTLS13},
		HTTPConfig: web.HTTPConfig{HTTP2: true},
	}
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)
	if err := decoder.Decode(&c.settings); err != nil && !errors.Is(err, io.EOF) { // an empty file is valid
		return nil, err
	}
	c.settings.TLSConfig.SetDirectory(filepath.Dir(file))
	for name, hash := range c.settings.Users {
		c.users[name] = []byte(hash)
	}
	if c.settings.TLSConfig.IsEnabled() {
		c.tls, err = serverTLS(&c.settings.TLSConfig, c.settings.HTTPConfig.HTTP2)
	}
	return c, err
}

// Equal reports whether two configurations were read from the same content.
func (c *Config) Equal(other *Config) bool { return c.sum == other.sum }

// Text returns the text of the file, or nil if it contains a private key, which must not be copied.
func (c *Config) Text() []byte {
	if c.settings.TLSConfig.TLSKey != "" {
		return nil
	}
	return c.text
}

// Certificate returns the server's certificate, or nil without TLS. It accepts a nil Config.
func (c *Config) Certificate() *x509.Certificate {
	if c == nil || c.tls == nil {
		return nil
	}
	return c.tls.Certificates[0].Leaf
}

// RequiresClientCertificate reports whether clients without a certificate are rejected.
func (c *Config) RequiresClientCertificate() bool {
	return c.tls != nil && (c.tls.ClientAuth == tls.RequireAnyClientCert || c.tls.ClientAuth == tls.RequireAndVerifyClientCert)
}

// Users returns the number of users with a password.
func (c *Config) Users() int { return len(c.users) }

// serverTLS returns exporter-toolkit's TLS settings for the file, with the certificate loaded now.
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
		return nil, errors.New("tls_server_config.client_ca_file: contains no certificate; add the PEM of the authority that signs client " +
			"certificates")
	}
	// RFC 9113, 9.2.2 requires one of these suites, and net/http does not serve HTTP/2 without.
	required := []uint16{tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256}
	if http2 && t.CipherSuites != nil && !slices.ContainsFunc(t.CipherSuites, func(c uint16) bool { return slices.Contains(required, c) }) {
		return nil, fmt.Errorf("tls_server_config.cipher_suites: HTTP/2 needs %s or %s; add one, or set http_server_config.http2 to false",
			tls.CipherSuiteName(required[0]), tls.CipherSuiteName(required[1]))
	}
	return t, nil
}

// FileContent returns the current content of a web configuration and of the files that it names, so that a change of
// any of them can be detected. Unreadable files count as empty: LoadConfig reports them.
func FileContent(file string) []byte {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil
	}
	return contentOf(file, text)
}

// contentOf returns the text of a web configuration and the current content of the files that it names.
func contentOf(file string, text []byte) []byte {
	var c web.Config
	_ = yaml.Unmarshal(text, &c)
	c.TLSConfig.SetDirectory(filepath.Dir(file))
	all := [][]byte{text}
	for _, name := range []string{c.TLSConfig.TLSCertPath, c.TLSConfig.TLSKeyPath, c.TLSConfig.ClientCAs} {
		var content []byte
		if name != "" {
			content, _ = os.ReadFile(name)
		}
		all = append(all, content)
	}
	return bytes.Join(all, []byte{0})
}
