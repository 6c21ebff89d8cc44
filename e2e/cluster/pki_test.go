//go:build cluster

package cluster

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
	"time"
)

// The users that the API server knows by their certificates.
const (
	admin       = "admin"
	kubeletUser = "kubelet"
	managerUser = "manager"
	schedUser   = "scheduler"
)

// pki is a certificate authority in files, good for a day.
type pki struct {
	dir    string
	ca     *x509.Certificate
	key    crypto.Signer
	serial int64
}

func newPKI(dir string) (*pki, error) {
	p := &pki{dir: dir}
	if err := errors.Join(os.MkdirAll(dir, 0o700), p.issue("ca", pkix.Name{CommonName: "test"})); err != nil {
		return nil, err
	}
	errs := []error{
		p.issue("server", pkix.Name{CommonName: "kube-apiserver"}),
		p.issue("to-kubelet", pkix.Name{CommonName: "kube-apiserver", Organization: []string{"system:masters"}}),
	}
	for user, name := range map[string]pkix.Name{
		admin:       {CommonName: "admin", Organization: []string{"system:masters"}},
		kubeletUser: {CommonName: "system:node:" + nodeName, Organization: []string{"system:nodes"}},
		managerUser: {CommonName: "system:kube-controller-manager"},
		schedUser:   {CommonName: "system:kube-scheduler"},
	} {
		errs = append(errs, p.issue(user, name), os.WriteFile(p.kubeconfig(user), fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "https://%s:443", certificate-authority: %s}}]
users: [{name: test, user: {client-certificate: %s, client-key: %s}}]
contexts: [{name: test, context: {cluster: test, user: test}}]
current-context: test
`, serviceIP, p.file("ca.crt"), p.file(user+".crt"), p.file(user+".key")), 0o600))
	}
	return p, errors.Join(errs...)
}

func (p *pki) file(name string) string       { return filepath.Join(p.dir, name) }
func (p *pki) kubeconfig(user string) string { return p.file(user + ".kubeconfig") }

// issue writes a key and a certificate; the first one is the authority's.
func (p *pki) issue(file string, name pkix.Name) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	p.serial++
	c := &x509.Certificate{
		SerialNumber: big.NewInt(p.serial), Subject: name,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{net.ParseIP(serviceIP), net.ParseIP(nodeIP), net.IPv4(127, 0, 0, 1)},
		DNSNames:    []string{nodeName, "localhost", "kubernetes.default.svc"},
	}
	if p.ca == nil {
		c.IsCA, c.BasicConstraintsValid, c.KeyUsage, c.ExtKeyUsage = true, true, x509.KeyUsageCertSign, nil
		p.ca, p.key = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, p.ca, key.Public(), p.key)
	if err != nil {
		return err
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(p.file(file+".crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600),
		os.WriteFile(p.file(file+".key"), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private}), 0o600),
	)
}
