"""The dashboards, written in Python; Grafana reads the JSON that ``build`` makes of them."""
