// The driver of franz-go, Sarama and kafka-go: see README.md of the folder above.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"time"
)

const giveUp = 45 * time.Second

type security struct {
	Protocol    string
	Mechanism   string
	User        string
	Password    string
	Token       string
	CA          string
	Certificate string
	Key         string
}

type record struct {
	Partition int32
	Codec     string
	Key       *string
	Value     string
	Headers   [][2]string
}

type job struct {
	Client    string
	Bootstrap string
	Topic     string
	Group     string
	Broker    string
	Records   []record
	First     int
	Security  security
	Output    string
}

type line struct {
	Part      int         `json:"part"`
	Partition int32       `json:"partition"`
	Offset    int64       `json:"offset"`
	Key       *string     `json:"key"`
	Value     string      `json:"value"`
	Headers   [][2]string `json:"headers"`
}

type output struct {
	job     *job
	encoder *json.Encoder
	count   int
}

func (o *output) write(part int, partition int32, offset int64, key, value []byte, headers [][2]string) {
	if headers == nil {
		headers = [][2]string{}
	}
	l := line{part, partition, offset, nil, hex.EncodeToString(value), headers}
	if key != nil {
		text := hex.EncodeToString(key)
		l.Key = &text
	}
	must(o.encoder.Encode(l))
	o.count++
}

// wants tells whether this member of the group has to go on.
func (o *output) wants(part int) bool {
	if part == 1 {
		return o.count < o.job.First
	}
	return o.count < len(o.job.Records)
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func unhex(text string) []byte {
	data, err := hex.DecodeString(text)
	must(err)
	return data
}

func (r *record) key() []byte {
	if r.Key == nil {
		return nil
	}
	return unhex(*r.Key)
}

// batches calls with the records of each codec in turn.
func (j *job) batches(do func(codec string, records []record)) {
	for start := 0; start < len(j.Records); {
		end := start
		for end < len(j.Records) && j.Records[end].Codec == j.Records[start].Codec {
			end++
		}
		do(j.Records[start].Codec, j.Records[start:end])
		start = end
	}
}

func (s *security) tls() *tls.Config {
	if s.CA == "" {
		return nil
	}
	pem, err := os.ReadFile(s.CA)
	must(err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	config := &tls.Config{RootCAs: roots}
	if s.Certificate != "" {
		certificate, err := tls.LoadX509KeyPair(s.Certificate, s.Key)
		must(err)
		config.Certificates = []tls.Certificate{certificate}
	}
	return config
}

func main() {
	text, err := os.ReadFile(os.Args[1])
	must(err)
	var j job
	must(json.Unmarshal(text, &j))
	file, err := os.Create(j.Output)
	must(err)
	o := &output{job: &j, encoder: json.NewEncoder(file)}
	ctx, cancel := context.WithTimeout(context.Background(), giveUp)
	defer cancel()
	map[string]func(context.Context, *job, *output){
		"franz-go": franz, "Sarama": saramaClient, "kafka-go": kafkaGo,
	}[j.Client](ctx, &j, o)
}
