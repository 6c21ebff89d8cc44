package agent

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
)

// PasswordEnv is the environment variable that holds the password for Access.User: arguments are there for
// everybody on the node to read.
const PasswordEnv = EnvPrefix + "_PASSWORD"

// Access is how to get at an agent with a web configuration. The zero Access is for one without.
type Access struct {
	CAFile            string // who signed the agent's certificate; "": one of those that this host trusts
	CertFile, KeyFile string // a certificate of our own, for an agent that asks for one
	Insecure          bool   // believe any certificate
	User, Password    string

	own *x509.Certificate // the only one to believe
}

// Here returns where the agent with a configuration is reached from its node. Its certificate is in the
// configuration, so it needs no signature, and no name that fits.
func (a *Access) Here(c Config) string {
	if c.web == nil || c.web.tls == nil {
		return c.Metrics.Listen
	}
	address, err := dialable(c.Metrics.Listen)
	if err != nil {
		return c.Metrics.Listen // said by who uses it
	}
	a.own = c.web.tls.Certificates[0].Leaf
	return "https://" + address
}

// client returns what makes requests so. Connections are not kept, and no proxy is asked.
func (a Access) client() (*http.Client, error) {
	t := &tls.Config{InsecureSkipVerify: a.Insecure || a.own != nil}
	if a.own != nil && !a.Insecure && a.CAFile == "" {
		t.VerifyConnection = func(s tls.ConnectionState) error {
			if !s.PeerCertificates[0].Equal(a.own) {
				return errors.New("its certificate is not that of metrics.webConfigFile; has it not been reloaded?")
			}
			return nil
		}
	}
	if a.CAFile != "" {
		text, err := os.ReadFile(a.CAFile)
		if err != nil {
			return nil, fmt.Errorf("--ca-file: %w", err)
		}
		t.RootCAs = x509.NewCertPool()
		if !t.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("--ca-file: %s holds no certificate; use a file in PEM", a.CAFile)
		}
		t.InsecureSkipVerify = a.Insecure
	}
	switch {
	case a.CertFile != "" && a.KeyFile != "":
		cert, err := tls.LoadX509KeyPair(a.CertFile, a.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("--cert-file, --key-file: %w", err)
		}
		t.Certificates = []tls.Certificate{cert}
	case a.CertFile != a.KeyFile:
		return nil, errors.New("--cert-file and --key-file belong together; use both")
	}
	if a.User != "" && a.Password == "" {
		return nil, fmt.Errorf("--user: put its password into $%s", PasswordEnv)
	}
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: t}}, nil
}

// hint says what to do about an error of a connection, "" if that is not known.
func hint(err error) string {
	_, unknown := errors.AsType[x509.UnknownAuthorityError](err)
	_, misnamed := errors.AsType[x509.HostnameError](err)
	switch {
	case unknown:
		return "; use --ca-file, or --insecure to believe it as it is"
	case misnamed:
		return "; use an --address that is in its certificate, or --insecure to believe it as it is"
	case strings.Contains(err.Error(), "certificate required"), strings.Contains(err.Error(), "bad certificate"):
		return "; it asks for a client's certificate: use --cert-file and --key-file"
	}
	return ""
}
