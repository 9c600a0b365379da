// The checks that every client gets, for the scripts `with_*.mjs`; checks.py says what each demands.

import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import { z } from 'zod'

export const BASE_URL = process.env.BASE_URL ?? 'http://127.0.0.1:8000'
export const MODEL = process.env.MODEL ?? 'demo'
export const V1 = BASE_URL + '/v1'
export const KEY = 'none'

export const HELLO = 'Tell me a story about a fox.'
export const QUESTION = 'What is the weather in Oslo?'
export const MANUAL =
  'You tell stories. ' + 'Once upon a time a fox found a lantern in the old harbour. '.repeat(60)
export const TOO_LONG = 'word '.repeat(70_000)
export const Paint = z.strictObject({
  colour: z.enum(['red', 'green', 'blue']),
  layers: z.union([z.literal(1), z.literal(2), z.literal(3)]),
})
export const Weather = z.strictObject({ city: z.string() })
const MIN_CACHED = 0.9
const OVERFLOW = /maximum context length|prompt is too long/
const NAMES = [
  'first_chat',
  'stream',
  'tool_round_trip',
  'second_turn',
  'structured_output',
  'overflow',
]

let cities = []

export function getWeather({ city }) {
  cities.push(city)
  return '7 degrees and rain'
}

async function cachedTokens() {
  const text = await (await fetch(BASE_URL + '/metrics')).text()
  return ['queries', 'hits'].map((name) =>
    Number(text.match(new RegExp(`^moeserve:prefix_cache_${name}_total\\S* (\\S+)`, 'm'))[1]),
  )
}

async function checkSecondTurn(turns) {
  assert((await turns.next()).done === false, 'the generator yields once')
  const before = await cachedTokens()
  assert((await turns.next()).done === true, 'the generator yields once')
  const [lookedUp, found] = (await cachedTokens()).map((count, i) => count - before[i])
  assert(lookedUp > 0 && found >= MIN_CACHED * lookedUp, `${found} of ${lookedUp} tokens cached`)
}

async function check(name, method) {
  if (name === 'second_turn') return checkSecondTurn(method())
  cities = []
  let result
  try {
    result = await method()
  } catch (error) {
    if (name === 'overflow' && OVERFLOW.test(`${error} ${error.responseBody ?? ''}`)) return
    throw error
  }
  assert(name !== 'overflow', `no error, but ${JSON.stringify(result)}`)
  if (name === 'structured_output') return void Paint.parse(result)
  if (name === 'stream') {
    assert(result.length > 1, JSON.stringify(result))
    result = result.join('')
  }
  assert(typeof result === 'string' && result.trim(), JSON.stringify(result))
  assert(name !== 'tool_round_trip' || cities.length, `no call, but ${JSON.stringify(result)}`)
}

// Run the checks of each of `apis`, {name: {first_chat() ...}}; exit with 1 if any failed.
export async function run(client, apis) {
  const about = new URL(`node_modules/${client}/package.json`, import.meta.url)
  const { version } = JSON.parse(readFileSync(about))
  for (const [api, checks] of Object.entries(apis)) {
    for (const name of NAMES.filter((name) => name in checks)) {
      let error = null
      try {
        await check(name, () => checks[name]())
      } catch (caught) {
        error = String(caught).slice(0, 1000)
        process.exitCode = 1
      }
      console.log(JSON.stringify({ client, version, api, check: name, error }))
    }
  }
}
