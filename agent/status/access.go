package status

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
const PasswordEnv = "GPU_NODE_AGENT_PASSWORD"

// Access is how to get at an agent with a web configuration. The zero Access is for one without.
type Access struct {
	CAFile            string // who signed the agent's certificate; "": one of those that this host trusts
	CertFile, KeyFile string // a certificate of our own, for an agent that asks for one
	Insecure          bool   // believe any certificate
	User, Password    string

	pinned *x509.Certificate // the only accepted one
}

// Local sets the access to this node's agent, which listens at an address with a certificate or nil, and returns its
// address for Ask. The certificate is verified by equality: it needs no trusted issuer and no matching name.
func (a *Access) Local(listen string, cert *x509.Certificate) string {
	address, err := dialAddress(listen)
	if cert == nil || err != nil { // Ask reports an invalid address
		return listen
	}
	a.pinned = cert
	return "https://" + address
}

// Client returns an HTTP client with this access. It keeps no connections and uses no proxy.
func (a Access) Client() (*http.Client, error) {
	t := &tls.Config{InsecureSkipVerify: a.Insecure || a.pinned != nil}
	if a.pinned != nil && !a.Insecure && a.CAFile == "" {
		t.VerifyConnection = func(s tls.ConnectionState) error {
			if !s.PeerCertificates[0].Equal(a.pinned) {
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
