#!/bin/sh
# k8s/keep-replicas.sh DIRECTORY: before the kustomization DIRECTORY is applied server-side, which has an autoscaler where there
# was none, gives the Deployment's number of replicas an owner of its own. Else the number, which the manifests do not have any
# more, would go, and the API server would put its default there: one.
set -eu
rendered=$(kubectl kustomize "$1")
echo "$rendered" | awk '
  /^---/ { is_scaler = is_target = 0 }
  /^kind: HorizontalPodAutoscaler/ { is_scaler = 1 }
  is_scaler && /^  namespace: / { namespace = $2 }
  is_scaler && /^  scaleTargetRef:/ { is_target = 1 }
  is_target && /^    name: / { print namespace, $2; is_target = 0 }
' | while read -r namespace name; do
  [ -z "$(kubectl --namespace "$namespace" get hpa "$name" --ignore-not-found --output name)" ] || continue
  replicas=$(kubectl --namespace "$namespace" get deployment "$name" --ignore-not-found --output 'jsonpath={.spec.replicas}')
  [ -n "$replicas" ] || continue
  kubectl apply --server-side --field-manager autoscaling --force-conflicts --validate=false --filename - <<END
apiVersion: apps/v1
kind: Deployment
metadata: {name: $name, namespace: $namespace}
spec: {replicas: $replicas}
END
done
