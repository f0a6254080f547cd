// A NameNode and a DataNode with WebHDFS, until standard input ends.
import java.nio.file.Path;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hdfs.MiniDFSCluster;

public class MiniDfs {
  public static void main(String[] folder) throws Exception {
    Configuration settings = new Configuration();
    settings.set("hadoop.http.staticuser.user", System.getProperty("user.name"));
    settings.set("hdfs.minidfs.basedir", Path.of(folder[0], "blocks").toString());
    MiniDFSCluster cluster = new MiniDFSCluster.Builder(settings).numDataNodes(1).build();
    cluster.waitActive();
    System.out.println("ready 127.0.0.1:" + cluster.getNameNodePort() + " " + cluster.getHttpUri(0).substring(7));
    System.out.flush();
    while (System.in.read() >= 0) {}
    cluster.shutdown();
  }
}
