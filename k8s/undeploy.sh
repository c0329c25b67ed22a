#!/bin/sh
# k8s/undeploy.sh OVERLAY: deletes what k8s/overlays/OVERLAY has made; see `compose.sh undeploy` for what stays, and for ALL.
#
# Frontends go first, and their streams go on until they end, for as long as the grace period of the pods: without schedulers
# and workers they could not. NOW=1 cuts the streams instead.
set -eu
cd "$(dirname "$0")/.."
k8s/compose.sh undeploy "${1:-}"

component=app.kubernetes.io/component=frontend
fields='{.metadata.namespace}|{.metadata.name}|{.metadata.labels.app\.kubernetes\.io/instance}|'
fields=$fields'{.spec.template.spec.terminationGracePeriodSeconds}'
kubectl get -k build/undeploy --ignore-not-found --selector "$component" --output \
  "jsonpath={range .items[?(@.kind==\"Deployment\")]}$fields{\"\\n\"}{end}" >build/undeploy/frontends.txt

late() { # a node that is lost keeps its pods
  echo "some frontends have not ended yet; the rest is deleted all the same" >&2
}
while IFS='|' read -r namespace name instance grace_s; do
  if [ -n "${NOW:-}" ]; then
    kubectl --namespace "$namespace" delete deployment "$name" --timeout 1m
    kubectl --namespace "$namespace" delete pods --grace-period 5 --timeout 1m \
      --selector "app.kubernetes.io/instance=$instance,$component" || late
  else
    echo "deployment $name ends with its last stream, within $grace_s s (NOW=1 does not wait)"
    kubectl --namespace "$namespace" delete deployment "$name" --cascade=foreground --timeout "$((grace_s + 60))s" || late
  fi </dev/null
done <build/undeploy/frontends.txt
# The schedulers have made their Lease themselves; the Role names it.
kubectl kustomize build/undeploy >build/undeploy/objects.txt
awk '/^  namespace: / { namespace = $2 } /^  resourceNames:/ { getline; print namespace, $2 }' build/undeploy/objects.txt \
  >build/undeploy/leases.txt
kubectl delete -k build/undeploy --ignore-not-found --timeout=5m
while read -r namespace lease; do
  kubectl --namespace "$namespace" delete lease "$lease" --ignore-not-found </dev/null
done <build/undeploy/leases.txt
