// The parts of the dashboards in Grafana's own types, from which the JSON schema for check.js is generated.
import type * as dashboard from '@grafana/schema/dist/types/raw/dashboard/x/types.gen';
import type * as bargauge from '@grafana/schema/dist/types/raw/composable/bargauge/panelcfg/x/types.gen';
import type * as stat from '@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/types.gen';
import type * as timeline from '@grafana/schema/dist/types/raw/composable/statetimeline/panelcfg/x/types.gen';
import type * as table from '@grafana/schema/dist/types/raw/composable/table/panelcfg/x/types.gen';
import type * as timeseries from '@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/types.gen';

export type OurDashboard = dashboard.Dashboard;
export type OurPanel = dashboard.Panel;
export type OurRow = dashboard.RowPanel;
// Of the Prometheus data source's queries, which are not in this package, what we use. The data source is the panel's.
export interface OurTarget {
  refId: string;
  expr: string;
  legendFormat?: string;
  format?: 'table' | 'time_series' | 'heatmap';
  range?: boolean;
  instant?: boolean;
}

// OurAnnotation has the options that the Prometheus data source adds to Grafana's type.
export interface OurAnnotation extends Omit<dashboard.AnnotationQuery, 'target'> {
  target: OurTarget & { interval?: string };
  titleFormat: string;
  textFormat: string;
  tagKeys: string;
  useValueForTime: boolean;
}

// Partial where Grafana fills in what is missing.
export type OurBargaugeOptions = Partial<bargauge.Options>;
export type OurStatOptions = Partial<stat.Options>;
export type OurStateTimelineOptions = Partial<timeline.Options>;
export type OurStateTimelineCustom = Partial<timeline.FieldConfig>;
export type OurTableOptions = Partial<table.Options>;
export type OurTableCustom = Partial<table.FieldConfig>;
export type OurTimeseriesOptions = timeseries.Options;
export type OurTimeseriesCustom = Partial<timeseries.FieldConfig>;
