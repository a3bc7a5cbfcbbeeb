"""The page's Jinja template. A module, not a data file, so that the store's code fingerprint covers it."""

from __future__ import annotations

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>What quantization cost</title>
<style>
  :root { color-scheme: light dark; --ink: #1a202c; --faint: #718096; --rule: #e2e8f0; --paper: #ffffff; }
  @media (prefers-color-scheme: dark) {
    :root { --ink: #e2e8f0; --faint: #a0aec0; --rule: #2d3748; --paper: #171923; }
  }
  body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
         max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
  h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
  dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; }
  dt, footer { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
  table { border-collapse: collapse; }
  th, td { padding: .2rem .9rem .2rem 0; text-align: right; border-bottom: 1px solid var(--rule);
           font-variant-numeric: tabular-nums; }
  th:first-child, td:first-child { text-align: left; }
  svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--ink); }
  svg .faint { fill: var(--faint); } svg line { stroke: var(--rule); }
  .swatch { display: inline-block; width: .8em; height: .8em; margin: 0 .4em 0 1em; }
</style>
</head>
<body>
<h1>What quantization cost</h1>
<dl>
  <dt>engine</dt><dd>{{ report.engine }}</dd>
  <dt>against</dt><dd>{{ report.against }}</dd>
</dl>
<h2>Measured</h2>
<table>
  <tr><th></th><th>engine</th><th>against</th></tr>
  {% for row in measurements %}
  <tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
  {% endfor %}
</table>
{% if "divergence" in report %}
<p>Over {{ report.divergence.num_positions }} positions of {{ report.perplexity.text }}, in windows of
{{ report.perplexity.window }} tokens.</p>
{% endif %}
{% if weights %}
<h2>Weights by scheme</h2>
<table>
  <tr><th>scheme</th><th>tensors</th><th>stored</th><th>bits per weight</th><th>relative error</th></tr>
  {% for row in schemes %}
  <tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
  {% endfor %}
</table>
<h2>Relative error of each weight, by layer</h2>
<p>|W &minus; dequantized| / |W|; every row has the same scale.
{% for colour, kind in chart.legend %}
<span><span class="swatch" style="background: {{ colour }}"></span>{{ kind }}</span>
{% endfor %}
</p>
<svg viewBox="0 0 {{ geometry.WIDTH }} {{ chart.height }}" role="img" aria-label="Relative error of each weight">
  {% for row in chart.rows %}
  <g transform="translate(0 {{ loop.index0 * geometry.ROW_HEIGHT }})">
    <line x1="{{ geometry.LABEL_WIDTH }}" x2="{{ geometry.WIDTH }}" y1="{{ geometry.ROW_HEIGHT - geometry.BAR_HEIGHT }}"
          y2="{{ geometry.ROW_HEIGHT - geometry.BAR_HEIGHT }}" stroke-dasharray="3 3"/>
    <line x1="{{ geometry.LABEL_WIDTH }}" x2="{{ geometry.WIDTH }}" y1="{{ geometry.ROW_HEIGHT }}"
          y2="{{ geometry.ROW_HEIGHT }}"/>
    <text x="0" y="{{ geometry.ROW_HEIGHT - 14 }}">{{ row.module }}</text>
    <text class="faint" x="{{ geometry.LABEL_WIDTH - 6 }}" y="{{ geometry.ROW_HEIGHT - geometry.BAR_HEIGHT + 4 }}"
          text-anchor="end">{{ "%.3f" | format(chart.largest) }}</text>
    {% for bar in row.bars %}
    <rect x="{{ bar.x }}" y="{{ bar.y }}" width="{{ bar.width }}" height="{{ bar.height }}" fill="{{ bar.colour }}">
      <title>{{ bar.title }}</title></rect>
    {% endfor %}
  </g>
  {% endfor %}
  {% for x, layer in chart.ticks %}
  <text class="faint" x="{{ x }}" y="{{ chart.height - 12 }}" text-anchor="middle">{{ layer }}</text>
  {% endfor %}
  <text class="faint" x="0" y="{{ chart.height - 12 }}">layer</text>
</svg>
<details>
<summary>All {{ weights | length }} weights</summary>
<table>
  <tr><th>weight</th><th>scheme</th><th>stored</th><th>bits per weight</th><th>relative error</th></tr>
  {% for weight in weights %}
  <tr><td>{{ weight.name }}</td><td>{{ weight.kind }}</td><td>{{ weight.stored }}</td><td>{{ weight.bits }}</td>
      <td>{{ weight.error }}</td></tr>
  {% endfor %}
</table>
</details>
{% else %}
<p>The engine's weights are not quantized.</p>
{% endif %}
<footer><p>Plansmith {{ version }}</p></footer>
</body>
</html>
"""
