#!/bin/sh
# k8s/compose.sh deploy|undeploy OVERLAY: writes build/deploy or build/undeploy, a kustomization upon k8s/overlays/OVERLAY with
# what only the caller or the cluster knows. No file of the overlay changes.
#
#   deploy    IMAGE_PREFIX and TAG, where either is set, name the images. API_SERVER has the addresses, ADDRESS:PORT, that the
#             scheduler may reach the API server at; an IPv6 address may stand in brackets. `auto` asks the cluster for them,
#             and nothing leaves the overlay's rule.
#             Pods of frontends get the grace period that the overlay's ORCINUS_DRAIN_S needs.
#             INSTANCE, where it is set, must be the overlay's: its pods are those that the caller waits for.
#   undeploy  Leaves out what holds somebody's data or belongs to others, too: the namespace, with the Secrets and all else
#             that was put there, claims, and classes of the cluster. ALL=1 leaves nothing out.
set -eu
cd "$(dirname "$0")/.."
verb=${1:-} overlay=${2:-}

fail() {
  echo "$1" >&2
  exit 1
}

case $overlay in '' | */* | .*) fail "OVERLAY=$overlay: it is the name of a directory in k8s/overlays" ;; esac
[ -f "k8s/overlays/$overlay/kustomization.yaml" ] ||
  fail "OVERLAY=$overlay: there is no k8s/overlays/$overlay/kustomization.yaml; there are: $(cd k8s/overlays && echo *)"

# The images of ours that the overlay renders to, as kustomize is to call them. A worker for GPUs has a tag of its own.
images() {
  echo "images:"
  for image in $(sed -n 's/^[- ]*image: *//p' "$1" | sort -u); do
    repository=${image%@*}
    name=${repository##*/}
    case ${name%%:*} in frontend | scheduler | worker | demo-model) ;; *) continue ;; esac
    case $name in *-cuda) suffix=-cuda ;; *) suffix= ;; esac
    case $name in *:*) repository=${repository%:*} ;; esac
    echo "  - {name: '$repository', newName: '${IMAGE_PREFIX:-${repository%/*}}/${name%%:*}', newTag: '${TAG:-dev}$suffix'}"
  done
}

# ADDRESS:PORT of the API server: behind its Service, and the Service's own, which some network plugins go by.
api_servers() {
  behind=$(kubectl --namespace default get endpoints kubernetes --output \
    'jsonpath={range .subsets[*]}{.addresses[*].ip}{"|"}{.ports[*].port}{"\n"}{end}') || return
  kubectl --namespace default get service kubernetes --output \
    'jsonpath={range .spec.clusterIPs[*]}{@}{":443\n"}{end}' || return
  echo "$behind" | while IFS='|' read -r addresses ports; do
    for address in $addresses; do for port in $ports; do echo "$address:$port"; done; done
  done
}

egress() {
  echo "patches:"
  echo "  - target: {kind: NetworkPolicy, name: orcinus-scheduler-api}"
  echo "    patch: |"
  echo "      - op: replace"
  echo "        path: /spec/egress"
  echo "        value:"
  for server in $1; do
    address=${server%:*}
    address=${address#[}
    address=${address%]}
    case $address in *:*) bits=128 ;; *) bits=32 ;; esac
    echo "          - {to: [{ipBlock: {cidr: '$address/$bits'}}], ports: [{protocol: TCP, port: ${server##*:}}]}"
  done
}

leave_out() {
  echo "  - {target: {kind: $2}, patch: '{apiVersion: $1, kind: $2, metadata: {name: any}, \$patch: delete}'}"
}

mkdir -p "build/$verb"
made=build/$verb/kustomization.yaml
printf 'resources:\n  - ../../k8s/overlays/%s\n' "$overlay" >"$made"
case $verb in
  deploy)
    kubectl kustomize "k8s/overlays/$overlay" >"build/$verb/overlay.txt"
    printf 'components:\n  - ../../k8s/components/drain\n' >>"$made"
    instance=$(awk '/^kind: Deployment/ { is_found = 1 } is_found && /app.kubernetes.io\/instance:/ { print $2; exit }' \
      "build/$verb/overlay.txt")
    [ "${INSTANCE:-$instance}" = "$instance" ] || fail "INSTANCE=$INSTANCE: k8s/overlays/$overlay is INSTANCE=$instance"
    if [ -n "${IMAGE_PREFIX:-}${TAG:-}" ]; then
      images "build/$verb/overlay.txt" >>"$made"
    elif grep -q 'image: registry\.invalid/' "build/$verb/overlay.txt"; then
      fail "k8s/overlays/$overlay takes its images from registry.invalid: name yours there, or say IMAGE_PREFIX=… TAG=…"
    fi
    servers=${API_SERVER:-}
    if [ "$servers" = auto ]; then
      servers=$(api_servers) || fail "The cluster does not tell its API server's addresses. Say API_SERVER=ADDRESS:PORT, or\
 API_SERVER= to leave the scheduler's way there as the overlay has it."
    fi
    [ -z "$servers" ] || egress "$servers" >>"$made"
    ;;
  undeploy)
    if [ -z "${ALL:-}" ]; then
      {
        echo "patches:"
        leave_out v1 Namespace
        leave_out v1 PersistentVolumeClaim
        leave_out scheduling.k8s.io/v1 PriorityClass
      } >>"$made"
    fi
    ;;
  *) fail "usage: k8s/compose.sh deploy|undeploy OVERLAY" ;;
esac
