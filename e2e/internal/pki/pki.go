// Package pki creates the keys and certificates of a test cluster.
package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"
)

// Masters is the group with all rights.
const Masters = "system:masters"

// Authority is a certificate authority that stores its files in a directory. Certificates are valid for a day.
type Authority struct {
	dir    string
	server string   // the API server's URL
	hosts  []string // subject alternative names of every certificate
	ca     *x509.Certificate
	key    crypto.Signer
	serial atomic.Int64
}

// New creates an authority in a directory, with the API server's certificate.
func New(dir, server string, hosts ...string) (*Authority, error) {
	a := &Authority{dir: dir, server: server, hosts: hosts}
	for _, do := range []func() error{
		func() error { return os.MkdirAll(dir, 0o700) },
		func() error { return a.issue("ca", pkix.Name{CommonName: "test"}) },
		func() error { return a.issue("server", pkix.Name{CommonName: "kube-apiserver"}) },
	} {
		if err := do(); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// File returns the path of a file of the authority, such as ca.crt.
func (a *Authority) File(name string) string { return filepath.Join(a.dir, name) }

// Kubeconfig returns the path of a user's kubeconfig.
func (a *Authority) Kubeconfig(user string) string { return a.File(user + ".kubeconfig") }

// User writes the key, the certificate and the kubeconfig of a user. The API server identifies the user by name and
// groups; the files have the name file.
func (a *Authority) User(file, name string, groups ...string) error {
	return errors.Join(
		a.issue(file, pkix.Name{CommonName: name, Organization: groups}),
		os.WriteFile(a.Kubeconfig(file), fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: %q, certificate-authority: %s}}]
users: [{name: test, user: {client-certificate: %s, client-key: %s}}]
contexts: [{name: test, context: {cluster: test, user: test}}]
current-context: test
`, a.server, a.File("ca.crt"), a.File(file+".crt"), a.File(file+".key")), 0o600),
	)
}

// ServerFlags returns the kube-apiserver flags that use the authority.
func (a *Authority) ServerFlags() []string {
	return []string{
		"--client-ca-file=" + a.File("ca.crt"), "--tls-cert-file=" + a.File("server.crt"), "--tls-private-key-file=" + a.File("server.key"),
		"--service-account-key-file=" + a.File("server.key"), "--service-account-signing-key-file=" + a.File("server.key"),
		"--service-account-issuer=https://kubernetes.default.svc",
	}
}

// issue writes a key and a certificate. The first call creates the authority's own.
func (a *Authority) issue(file string, name pkix.Name) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(a.serial.Add(1)), Subject: name,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	for _, host := range a.hosts {
		if ip := net.ParseIP(host); ip != nil {
			c.IPAddresses = append(c.IPAddresses, ip)
		} else {
			c.DNSNames = append(c.DNSNames, host)
		}
	}
	if a.ca == nil {
		c.IsCA, c.BasicConstraintsValid, c.KeyUsage, c.ExtKeyUsage = true, true, x509.KeyUsageCertSign, nil
		a.ca, a.key = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, a.ca, key.Public(), a.key)
	if err != nil {
		return err
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(a.File(file+".crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600),
		os.WriteFile(a.File(file+".key"), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private}), 0o600),
	)
}
