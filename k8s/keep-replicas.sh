#!/bin/sh
# k8s/keep-replicas.sh DIRECTORY: before the kustomization DIRECTORY is applied server-side, which has an autoscaler where there
# was none (a HorizontalPodAutoscaler, or a scheduler with the right to scale its workers), gives the Deployment's number of
# replicas an owner of its own. Else the number, which the manifests do not have any more, would go, and the API server would put
# its default there: one.
#
# The first server-side apply after a client-side one takes over all of its fields, for its own field manager. So kubectl's usual
# manager takes them first, by applying once more what was applied last, with the number of now, and the manager `autoscaling`
# owns the number alone. Fields of others, as of `kubectl rollout restart`, stay with them.
set -eu
rendered=$(kubectl kustomize "$1")
client_side='{.metadata.annotations.kubectl\.kubernetes\.io/last-applied-configuration}'
echo "$rendered" | awk '
  /^---/ { kind = ""; is_target = 0 }
  /^kind: HorizontalPodAutoscaler$/ { kind = "hpa" }
  /^kind: Role$/ { kind = "role" }
  /^  name: / { scaler = $2 }
  /^  namespace: / { namespace = $2 }
  kind == "hpa" && /^  scaleTargetRef:/ { is_target = 1 }
  kind == "hpa" && is_target && /^    name: / { print namespace, $2, kind "/" scaler; is_target = 0 }
  kind == "role" && /^  - deployments\/scale$/ { print namespace, item, kind "/" scaler }
  /^  - / { item = $2 } # a rule has the name of its Deployment, and then deployments/scale
' | while read -r namespace name scaler; do
  scaler=$(kubectl --namespace "$namespace" get "$scaler" --ignore-not-found --output name)
  [ -z "$scaler" ] || continue
  replicas=$(kubectl --namespace "$namespace" get deployment "$name" --ignore-not-found --output 'jsonpath={.spec.replicas}')
  [ -n "$replicas" ] || continue
  applied=$(kubectl --namespace "$namespace" get deployment "$name" --output "jsonpath=$client_side")
  if [ -n "$applied" ]; then
    printf '%s\n' "$applied" |
      kubectl patch --local --filename - --type merge --patch "{\"spec\": {\"replicas\": $replicas}}" --output json |
      kubectl apply --server-side --force-conflicts --validate=false --filename -
  fi
  kubectl apply --server-side --field-manager autoscaling --force-conflicts --validate=false --filename - <<END
apiVersion: apps/v1
kind: Deployment
metadata: {name: $name, namespace: $namespace}
spec: {replicas: $replicas}
END
done
