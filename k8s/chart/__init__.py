"""The Helm chart, made from the kustomize base and components, so that nothing is described twice.

`python -m k8s.chart DIRECTORY` renders the base alone, with each component, and with some
components together. What all renderings have in common becomes a template, and what a component
changes stands in it under a condition on the component's value (`conditional`). Places whose
content is a value of the chart are found by rendering with numbers that nothing else has
(`places`). The values have a typed description (`values`), of which `values.yaml` and
`values.schema.json` are made.
"""
