/** Which widgets of xDiT Parallel Config count, given the values of all. Used by xdit.js, and by tests in Node. */

const DEGREES = ["cfg_degree", "data_degree", "pipefusion_degree", "ring_degree", "ulysses_degree", "tensor_degree", "displaced_degree"];
const PIPEFUSION = ["num_patches", "stage_blocks", "warmup", "offload_keys_values"];
const DISPLACED = ["displaced_mode"];
const BOTH = ["warmup_steps", "forecast_keys_values"];
const CHANGE = ["approximate"];
const EXCHANGE = ["exchange"];             // between devices that share tokens

/**
 * Names of the widgets that count for nothing with these values. defaults: {name: value}. In auto mode a setting of PipeFusion counts
 * where auto takes that, so what is not the default stays in sight.
 */
export function idleWidgets(values, defaults) {
  if (values.mode === "auto")
    return [...DEGREES, ...DISPLACED, ...[...PIPEFUSION, ...BOTH].filter((name) => values[name] === defaults[name])];
  const pipefusion = values.pipefusion_degree > 1;
  const displaced = values.displaced_degree > 1;
  const shared = values.ulysses_degree > 1 || values.ring_degree > 1;
  const rounded = shared && values.exchange !== defaults.exchange;
  return [...(pipefusion ? [] : PIPEFUSION), ...(displaced ? [] : DISPLACED), ...(pipefusion || displaced ? [] : BOTH),
    ...(pipefusion || displaced || rounded ? [] : CHANGE), ...(shared ? [] : EXCHANGE)];
}
