package status

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"

	"github.com/spf13/pflag"
)

// PasswordEnv is the environment variable with the password of Access.User. It is not a flag: every user of the node can
// read the arguments of a process.
const PasswordEnv = "GPU_NODE_AGENT_PASSWORD"

// Access is what a client needs to reach an agent with a web configuration. The zero Access is for one without.
type Access struct {
	CAFile            string // of the authority that signed the agent's certificate; "": the host's trust store
	CertFile, KeyFile string // the client's certificate, for an agent that requires one
	ServerName        string // in the agent's certificate; "": the host of its address
	Insecure          bool   // accept any certificate of the agent
	User, Password    string

	pinned *x509.Certificate // the only accepted one
}

// AddFlags adds the flags of a command that asks agents. The password is not one of them.
func (a *Access) AddFlags(flags *pflag.FlagSet) {
	flags.StringVar(&a.CAFile, "ca-file", "", "PEM file of the CA that signed the agent's certificate (default: this host's CAs)")
	flags.StringVar(&a.CertFile, "cert-file", "", "PEM file of a client certificate, if the agent requires one")
	flags.StringVar(&a.KeyFile, "key-file", "", "PEM file of the client certificate's key")
	flags.StringVar(&a.ServerName, "server-name", "", "name in the agent's certificate (default: the host of its address)")
	flags.BoolVar(&a.Insecure, "insecure", false, "accept any certificate of the agent")
	flags.StringVar(&a.User, "user", "", "user name, if the agent requires a password")
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

// Validate returns the error that each request would have.
func (a Access) Validate() error {
	_, err := a.client()
	return err
}

// client returns an HTTP client with this access. It keeps no connections and uses no proxy.
func (a Access) client() (*http.Client, error) {
	t := &tls.Config{ServerName: a.ServerName, InsecureSkipVerify: a.Insecure || a.pinned != nil}
	if a.pinned != nil && !a.Insecure && a.CAFile == "" {
		t.VerifyConnection = func(s tls.ConnectionState) error {
			if !s.PeerCertificates[0].Equal(a.pinned) {
				return errors.New("server certificate differs from metrics.webConfigFile; reload the agent")
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
			return nil, fmt.Errorf("--ca-file: %s contains no certificate; use a PEM file", a.CAFile)
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
		return nil, errors.New("--cert-file and --key-file: only one is set; set both")
	}
	if a.User != "" && a.Password == "" {
		return nil, fmt.Errorf("--user: no password; set $%s", PasswordEnv)
	}
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: t}}, nil
}

// hint returns advice on a connection error, "" if there is none.
func hint(err error) string {
	_, untrusted := errors.AsType[x509.UnknownAuthorityError](err)
	_, nameDiffers := errors.AsType[x509.HostnameError](err)
	switch {
	case untrusted:
		return "; use --ca-file, or --insecure to accept any certificate"
	case nameDiffers:
		return "; use an address that the certificate names, --server-name, or --insecure to accept any certificate"
	case strings.Contains(err.Error(), "certificate required"), strings.Contains(err.Error(), "bad certificate"):
		return "; the agent requires a client certificate: use --cert-file and --key-file"
	}
	return ""
}
