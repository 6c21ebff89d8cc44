package plugin

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// ResourceRule sets the resource of devices by model or by MIG profile.
type ResourceRule struct {
	// Pattern matches the model, such as *H100*. If it begins with mig-, it matches the profile of MIG devices under the
	// strategy mixed, such as mig-1g.*. "*" matches any characters, "?" matches one; case is ignored.
	Pattern  string `yaml:"pattern"`
	Resource string `yaml:"resource"`
}

// The limits of a qualified name. The kubelet checks the name with the prefix "requests.", as in quotas, which leaves 9
// characters less for the domain.
const (
	maxNameLength   = 63
	maxDomainLength = 253 - len("requests.")
)

// domainPattern matches a DNS subdomain in lower case.
const domainPattern = `^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`

// validateName applies the kubelet's rules (v1helper.IsExtendedResourceName), so that an invalid name is reported with
// the configuration and not at registration.
func validateName(key, resource string) error {
	return validateNameLike(key, resource, "nvidia.com/gpu")
}

// validateNameLike is validateName with another example.
func validateNameLike(key, resource, example string) error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%s: %q %s; use DOMAIN/NAME such as %s", key, resource, fmt.Sprintf(format, args...), example)
	}
	domain, name, found := strings.Cut(resource, "/")
	switch {
	case resource == "":
		return bad("is empty")
	case !found || domain == "":
		return bad("has no domain")
	case name == "":
		return bad("has no name after the domain")
	case strings.Contains(name, "/"):
		return bad("has more than one slash")
	case strings.HasSuffix(domain, "kubernetes.io"):
		return bad("is reserved for Kubernetes")
	case strings.HasPrefix(domain, "requests."):
		return bad("starts with requests., which is reserved for quotas")
	case len(domain) > maxDomainLength:
		return bad("has a domain of %d characters, the limit is %d", len(domain), maxDomainLength)
	case len(name) > maxNameLength:
		return bad("has a name of %d characters, the limit is %d", len(name), maxNameLength)
	case !matches(domainPattern, domain):
		return bad("has a domain with characters other than a-z, 0-9, - and .")
	case !matches(`^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`, name):
		return bad("has a name with characters other than letters, digits, -, _ and ., or without a letter or digit at both ends")
	}
	return nil
}

func matches(pattern, s string) bool { return regexp.MustCompile(pattern).MatchString(s) }

func (c Config) validateRules() error {
	var errs []error
	for i, rule := range c.Resources {
		key := fmt.Sprintf("resources[%d]", i)
		if rule.Pattern == "" {
			errs = append(errs, fmt.Errorf("%s.pattern: is empty; use a model such as *H100* or a MIG profile such as mig-1g.*", key))
		}
		errs = append(errs, validateName(key+".resource", rule.Resource))
	}
	return errors.Join(errs...)
}

// resourceNames returns every resource name that the configuration can produce, with one for all MIG profiles.
func (c Config) resourceNames() []string {
	all := []string{c.Resource}
	for _, rule := range c.Resources {
		all = append(all, rule.Resource)
	}
	if c.MIGStrategy == MIGMixed {
		all = append(all, c.migPrefix()+"1g.00gb.attributes")
	}
	for _, e := range c.Sharing.entries() {
		if e.rename == "" && e.renameByDefault {
			all = append(all, e.name+sharedSuffix)
		}
		all = append(all, e.rename)
	}
	return all
}

// migPrefix returns the start of the names of MIG resources: "nvidia.com/mig-". The domain is the GPUs' domain.
func (c Config) migPrefix() string {
	domain, _, _ := strings.Cut(c.Resource, "/")
	return domain + "/" + migPrefix
}

// gpuResource returns the resource of a whole GPU, and under the strategy single of a MIG device, by its model.
func (c Config) gpuResource(model string) string {
	for _, rule := range c.Resources {
		if !strings.HasPrefix(rule.Pattern, migPrefix) && glob(rule.Pattern, model) {
			return rule.Resource
		}
	}
	return c.Resource
}

// migResource returns the resource of a MIG device by its profile: nvidia.com/mig-1g.10gb.me for 1g.10gb+me, because +
// is invalid in a resource name.
func (c Config) migResource(profile string) string {
	for _, rule := range c.Resources {
		if pattern, ok := strings.CutPrefix(rule.Pattern, migPrefix); ok && glob(pattern, profile) {
			return rule.Resource
		}
	}
	return c.migPrefix() + strings.ReplaceAll(profile, "+", ".")
}
