// Package promapi is a client of Prometheus' HTTP API for tests.
package promapi

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// API is a client of Prometheus' HTTP API.
type API struct {
	URL    string
	client http.Client
}

// get requests a page of the API and decodes its data.
func (a *API) get(ctx context.Context, path string, query url.Values, into any) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, a.URL+path+"?"+query.Encode(), nil)
	if err != nil {
		return err
	}
	r, err := a.client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = r.Body.Close() }()
	var answer struct {
		Status string          `json:"status"`
		Error  string          `json:"error"`
		Data   json.RawMessage `json:"data"`
	}
	if err := json.NewDecoder(r.Body).Decode(&answer); err != nil {
		return fmt.Errorf("%s: %s: %w", path, r.Status, err)
	}
	if answer.Status != "success" {
		return fmt.Errorf("%s: %s", path, answer.Error)
	}
	return json.Unmarshal(answer.Data, into)
}

// Series is a series of a result with its numbers, of which Value is the newest.
type Series struct {
	Labels map[string]string
	Value  float64
	Values []float64
}

// sample is a time and a value in the API's format.
type sample [2]any

func (s sample) value() float64 {
	text, ok := s[1].(string)
	if !ok {
		return math.NaN()
	}
	v, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return math.NaN()
	}
	return v
}

// Query evaluates an expression at the current time. It drops series whose value is NaN.
func (a *API) Query(ctx context.Context, expr string) ([]Series, error) {
	return a.evaluate(ctx, "/api/v1/query", url.Values{"query": {expr}})
}

// QueryRange evaluates an expression at each step of the last three minutes. It drops numbers that are NaN.
func (a *API) QueryRange(ctx context.Context, expr string, step time.Duration) ([]Series, error) {
	now := time.Now()
	return a.evaluate(ctx, "/api/v1/query_range", url.Values{
		"query": {expr}, "step": {strconv.FormatFloat(step.Seconds(), 'f', 3, 64)}, "start": {unixSeconds(now.Add(-3 * time.Minute))},
		"end": {unixSeconds(now)},
	})
}

// unixSeconds formats a time for Prometheus. Whole seconds would put the end before the newest scrape.
func unixSeconds(t time.Time) string {
	return strconv.FormatFloat(float64(t.UnixMilli())/1000, 'f', 3, 64)
}

func (a *API) evaluate(ctx context.Context, path string, query url.Values) ([]Series, error) {
	var data struct {
		Result []struct {
			Metric map[string]string `json:"metric"`
			Value  sample            `json:"value"`
			Values []sample          `json:"values"`
		} `json:"result"`
	}
	if err := a.get(ctx, path, query, &data); err != nil {
		return nil, fmt.Errorf("%w: %s", err, query.Get("query"))
	}
	var all []Series
	for _, r := range data.Result {
		var values []float64
		for _, s := range append(r.Values, r.Value) {
			if v := s.value(); !math.IsNaN(v) {
				values = append(values, v)
			}
		}
		if len(values) > 0 {
			all = append(all, Series{r.Metric, values[len(values)-1], values})
		}
	}
	return all, nil
}

// LabelValues returns the values of a label of the series that match a selector.
func (a *API) LabelValues(ctx context.Context, selector, label string) ([]string, error) {
	var values []string
	err := a.get(ctx, "/api/v1/label/"+label+"/values", url.Values{"match[]": {selector}}, &values)
	return values, err
}

// Alert is a pending or firing alert.
type Alert struct {
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
	State       string            `json:"state"`
}

// Alerts returns the pending and firing alerts.
func (a *API) Alerts(ctx context.Context) ([]Alert, error) {
	var data struct {
		Alerts []Alert `json:"alerts"`
	}
	err := a.get(ctx, "/api/v1/alerts", nil, &data)
	return data.Alerts, err
}

// RuleHealth is the result of a rule's last evaluation.
type RuleHealth struct {
	Name      string `json:"name"`
	Type      string `json:"type"` // alerting, recording
	Health    string `json:"health"`
	LastError string `json:"lastError"`
}

// Rules returns the health of every rule.
func (a *API) Rules(ctx context.Context) ([]RuleHealth, error) {
	var data struct {
		Groups []struct {
			Rules []RuleHealth `json:"rules"`
		} `json:"groups"`
	}
	err := a.get(ctx, "/api/v1/rules", nil, &data)
	var all []RuleHealth
	for _, g := range data.Groups {
		all = append(all, g.Rules...)
	}
	return all, err
}
