// Types of the parts of a dashboard, as JSON has them: a string in place of the member of an enumeration.
import type { Dashboard, Panel, RowPanel } from "@grafana/schema";
import type { Options as StatOptions } from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type { FieldConfig, Options } from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

type Json<T> = T extends string
  ? string extends T ? T : `${T}`
  : T extends number | boolean | null | undefined ? T
  : T extends (infer U)[] ? Json<U>[]
  : T extends object ? { [K in keyof T]: Json<T[K]> }
  : T;

export type dashboard = Json<Dashboard>;
export type row = Json<RowPanel>;
export type panel = Json<Panel>;
export type stat = Json<StatOptions>;
export type timeseries = Json<Options>;
export type curve = Json<FieldConfig>;
