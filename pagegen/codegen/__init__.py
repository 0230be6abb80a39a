"""From a spec, a layout and a variant to source text. Pure: same inputs, same bytes."""
