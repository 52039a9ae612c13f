/** Relevance of xDiT Parallel Config's widgets for the current settings. */

const DEGREES = ["cfg_degree", "data_degree", "pipefusion_degree", "ring_degree", "ulysses_degree", "tensor_degree", "displaced_degree"];
const PIPEFUSION = ["num_patches", "stage_blocks", "warmup", "offload_keys_values"];
const DISPLACED = ["displaced_mode"];
const BOTH = ["warmup_steps", "forecast_keys_values"];
const APPROXIMATE = ["approximate"];
const EXCHANGE = ["exchange"];             // needs devices that split tokens
const SPARSE = ["sparse_settings"];

/**
 * Return the names of the widgets that have no effect with these values. defaults: {name: value}. In auto mode, PipeFusion's settings apply
 * if auto chooses PipeFusion, so those that differ from their defaults stay visible.
 */
export function idleWidgets(values, defaults) {
  const dense = values.sparse_attention === defaults.sparse_attention;
  if (values.mode === "auto")
    return [...DEGREES, ...DISPLACED, ...(dense ? SPARSE : []), ...[...PIPEFUSION, ...BOTH].filter((name) => values[name] === defaults[name])];
  const pipefusion = values.pipefusion_degree > 1;
  const displaced = values.displaced_degree > 1;
  const splitsTokens = values.ulysses_degree > 1 || values.ring_degree > 1;
  const rounded = splitsTokens && values.exchange !== defaults.exchange;
  return [...(pipefusion ? [] : PIPEFUSION), ...(displaced ? [] : DISPLACED), ...(pipefusion || displaced ? [] : BOTH),
    ...(pipefusion || displaced || rounded || !dense ? [] : APPROXIMATE), ...(splitsTokens ? [] : EXCHANGE), ...(dense ? SPARSE : [])];
}
