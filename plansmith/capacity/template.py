"""The plot's Jinja templates. A module, not data files, so that the store's code fingerprint covers it."""

from __future__ import annotations

SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ geometry.WIDTH }} {{ chart.height + 46 }}" role="img"
     aria-label="Memory of a GPU by layout, and decode throughput by batch size" font-family="system-ui, sans-serif">
  <style>
    .ink { fill: #1a202c; font-size: 12px; } .faint { fill: #718096; font-size: 12px; }
    .rule { stroke: #cbd5e0; } .end { stroke: #c53030; stroke-width: 2; } .curve { fill: none; stroke-width: 2; }
  </style>
  <rect width="{{ geometry.WIDTH }}" height="{{ chart.height + 46 }}" fill="#ffffff"/>
  <g transform="translate(0 16)">
  <text class="ink" x="0" y="0">Memory of one {{ report.gpu.title }}, weights {{ report.weights.precision }}</text>
  {% for colour, title in chart.legend %}
  <rect x="{{ geometry.LEFT + loop.index0 * 126 }}" y="8" width="10" height="10" fill="{{ colour }}"/>
  <text class="faint" x="{{ geometry.LEFT + 14 + loop.index0 * 126 }}" y="17">{{ title }}</text>
  {% endfor %}
  </g>
  <g transform="translate(0 46)">
  {% for bar in chart.bars %}
  <g transform="translate(0 {{ loop.index0 * geometry.ROW_HEIGHT }})">
    <text class="{{ "ink" if bar.fits else "faint" }}" x="0" y="{{ geometry.BAR_HEIGHT - 3 }}">{{ bar.label }}
      {{- "" if bar.fits else ": does not fit" }}</text>
    {% for part in bar.parts %}
    <rect x="{{ part.x }}" y="0" width="{{ part.width }}" height="{{ geometry.BAR_HEIGHT }}" fill="{{ part.colour }}"
          {% if not bar.fits %}opacity="0.4"{% endif %}><title>{{ part.title }}</title></rect>
    {% endfor %}
  </g>
  {% endfor %}
  <line class="end" x1="{{ chart.capacity_x }}" x2="{{ chart.capacity_x }}" y1="-4" y2="{{ chart.bars_height - 26 }}"/>
  {% for x, label in chart.memory_ticks %}
  <text class="faint" x="{{ x }}" y="{{ chart.bars_height - 10 }}" text-anchor="{{ "end" if loop.last else "middle" }}">
    {{- label }}</text>
  {% endfor %}
  {% if chart.curves %}
  <g transform="translate(0 {{ chart.bars_height + 40 }})">
    <text class="ink" x="0" y="-16">Decode, tokens per second at most (roofline), sequences of
      {{ report.workload.context }} tokens</text>
    {% for y, label in chart.speed_ticks %}
    <line class="rule" x1="{{ geometry.LEFT }}" x2="{{ geometry.WIDTH - geometry.RIGHT }}" y1="{{ y }}" y2="{{ y }}"/>
    <text class="faint" x="{{ geometry.LEFT - 8 }}" y="{{ y + 4 }}" text-anchor="end">{{ label }}</text>
    {% endfor %}
    {% for x, label in chart.batch_ticks %}
    <text class="faint" x="{{ x }}" y="{{ geometry.PANEL_HEIGHT + 18 }}" text-anchor="middle">{{ label }}</text>
    {% endfor %}
    <text class="faint" x="0" y="{{ geometry.PANEL_HEIGHT + 18 }}">sequences at once</text>
    {% for curve in chart.curves %}
    <polyline class="curve" points="{{ curve.points }}" stroke="{{ curve.colour }}"/>
    <circle cx="{{ curve.end[0] }}" cy="{{ curve.end[1] }}" r="3" fill="{{ curve.colour }}"/>
    <rect x="{{ geometry.LEFT + 12 }}" y="{{ 8 + loop.index0 * 18 }}" width="10" height="10" fill="{{ curve.colour }}"/>
    <text class="ink" x="{{ geometry.LEFT + 28 }}" y="{{ 17 + loop.index0 * 18 }}">{{ curve.label }}</text>
    {% endfor %}
  </g>
  {% endif %}
  </g>
</svg>
"""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Capacity plan</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; color: #1a202c; background: #ffffff; max-width: 72rem;
         margin: 2rem auto; padding: 0 1rem; }
  h1 { font-size: 1.5rem; } table { border-collapse: collapse; margin: 1rem 0; } footer { color: #718096; }
  pre { white-space: pre-wrap; }
  th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid #e2e8f0;
           font-variant-numeric: tabular-nums; }
  svg { width: 100%; height: auto; }
</style>
</head>
<body>
<h1>Capacity plan</h1>
<pre>{{ summary }}</pre>
{{ svg }}
{% for headers, rows in tables %}
<table>
  <tr>{% for header in headers %}<th>{{ header }}</th>{% endfor %}</tr>
  {% for row in rows %}
  <tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
  {% endfor %}
</table>
{% endfor %}
<pre>{{ closing }}</pre>
<footer><p>Plansmith {{ version }}</p></footer>
</body>
</html>
"""
